"""Keywords of a JSON schema that xgrammar would read and not enforce.

SGLang refuses such a schema where it stands alone, and not where it is a part of a structural tag.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from any_agent.errors import UnsupportedParameter

# fmt: off
_KEYWORDS = {
    "contains", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
    "minContains", "multipleOf", "not", "then", "uniqueItems",
}
_FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer",
    "relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid",
}
# fmt: on
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependencies")
"""Keywords whose values hold schemas by names of the schema's author."""
_DATA = ("const", "enum", "default", "examples")


def require_enforced(schema: Any, name: str) -> None:
    """UnsupportedParameter, under this name, for a schema with such parts."""
    for part in _schemas(schema):
        ignored = sorted(_KEYWORDS & part.keys())
        text_format = part.get("format", "date")
        if not isinstance(text_format, str) or text_format not in _FORMATS:
            ignored.append("format")
        if sum(map(part.__contains__, ("format", "pattern"))) + _has_length(part) > 1:
            ignored.append("format, pattern and lengths of one text")
        if ignored:
            raise UnsupportedParameter(
                f"{name} together with tools cannot have {', '.join(ignored)}, which grammars of "
                "that kind do not enforce: leave that out of the schema, or leave out the tools",
                param=name,
            )


def _has_length(schema: dict[str, Any]) -> bool:
    return "minLength" in schema or "maxLength" in schema


def _schemas(whole: Any) -> Iterator[dict[str, Any]]:
    """A schema and those within it."""
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
