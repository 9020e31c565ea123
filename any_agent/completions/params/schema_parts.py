"""The parts of an agent's JSON schema, and its formats of texts, which no grammar has all of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# fmt: off
FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer",
    "relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid",
}
# fmt: on
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependencies")
"""Keywords whose values are schemas by names that the schema's author chose."""
_DATA = ("const", "enum", "default", "examples")


def schemas_in(whole: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and the schemas within it."""
    left = [whole]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            yield part
            for keyword, value in part.items():
                if keyword in _BY_NAME and isinstance(value, dict):
                    left += value.values()
                elif keyword not in _DATA:
                    left.append(value)


def unknown_formats(schema: Any) -> list[str]:
    """Return the formats in a schema that no grammar enforces, such as `password`."""
    found = {part["format"] for part in schemas_in(schema) if _is_annotation(part.get("format"))}
    return sorted(found)


def without_unknown_formats(part: Any) -> Any:
    """Return a copy of a schema, of bounded depth, in which these formats are left out."""
    if isinstance(part, list):
        return [without_unknown_formats(each) for each in part]
    if not isinstance(part, dict):
        return part
    copy = {}
    for keyword, value in part.items():
        if keyword == "format" and _is_annotation(value):
            continue
        if keyword in _BY_NAME and isinstance(value, dict):
            copy[keyword] = {name: without_unknown_formats(each) for name, each in value.items()}
        else:
            copy[keyword] = value if keyword in _DATA else without_unknown_formats(value)
    return copy


def _is_annotation(text_format: Any) -> bool:
    return isinstance(text_format, str) and text_format not in FORMATS
