"""Checks one value of a request by its JSON schema; errors name the parameter.

The schemas are those of `/openapi.json`, and only their keywords are known here: types, enums,
bounds, lengths, and lists of scalars. `x-max-bytes` bounds an object's JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from any_agent.errors import InvalidRequest, UnsupportedParameter

Schema = dict[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "string": (str,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_WORDS = {
    "number": "a number",
    "integer": "an integer",
    "boolean": "true or false",
    "string": "a string",
    "object": "an object",
    "array": "a list",
    "null": "null",
}
_MAX_SHOWN = 60


def check(value: Any, schema: Schema, name: str) -> None:
    """Raise InvalidRequest with the parameter and its schema in words, unless the value fits."""
    if not fits(value, schema):
        raise InvalidRequest(f"{name} must be {words(schema)}", param=name)


def require_object(value: Any, name: str) -> dict[str, Any]:
    """Return the value; InvalidRequest unless it is an object."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", param=name)
    return value


def require_names(given: Mapping[str, Any], at: str, known: tuple[str, ...]) -> None:
    """Raise UnsupportedParameter for a field with another name."""
    for name in given:
        if name not in known:
            where = f"{at}.{shown(str(name))[1:-1]}"
            raise UnsupportedParameter(f"unknown parameter {where}", param=where)


def json_text(value: Any, name: str, *, longest: int) -> str:
    """Return the value's JSON; InvalidRequest if it has more than ``longest`` bytes."""
    try:
        text = orjson.dumps(value)
    except TypeError:
        # Lone surrogates, integers beyond 64 bits, nesting without end.
        raise InvalidRequest(
            f"{name} has text that is not Unicode, an integer beyond 64 bits, or too many levels: "
            "leave that out",
            param=name,
        ) from None
    if len(text) > longest:
        raise InvalidRequest(
            f"{name} is {len(text)} bytes of JSON, more than {longest}: make it smaller",
            param=name,
        )
    return text.decode()


def shown(value: Any) -> str:
    """Return a value for an error's message, however large or strange it is."""
    if isinstance(value, str):
        return json.dumps(value[:_MAX_SHOWN])
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return "a huge integer"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return _WORDS["object" if isinstance(value, dict) else "array"]


def words(schema: Schema) -> str:
    """Return a schema in words."""
    if "anyOf" in schema:
        return " or ".join(words(each) for each in schema["anyOf"])
    if "enum" in schema:
        return _one_of([json.dumps(each) for each in schema["enum"]])
    kind = schema["type"]
    text = _WORDS[kind]
    if schema.get("minLength") or schema.get("minItems"):
        text = text.replace("a ", "a non-empty ", 1)
    if kind == "array" and "type" in schema.get("items", {}):
        text += f" of {_PLURALS[schema['items']['type']]}"
    return text + _bounds(schema)


_PLURALS = {
    "string": "strings",
    "integer": "integers",
    "object": "objects",
    "array": "lists",
}


def _one_of(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _bounds(schema: Schema) -> str:
    low, above, high = map(schema.get, ("minimum", "exclusiveMinimum", "maximum"))
    out = ""
    if low is not None and high is not None:
        out = f" from {_figure(low)} to {_figure(high)}"
    elif above is not None and high is not None:
        out = f" greater than {_figure(above)} and at most {_figure(high)}"
    elif low is not None:
        out = f" of at least {_figure(low)}"
    for key, what in (
        ("maxLength", "characters"),
        ("maxItems", "items"),
        ("maxProperties", "entries"),
        ("x-max-bytes", "bytes of JSON"),
    ):
        if key in schema:
            out += f" of at most {schema[key]} {what}"
    return out


def _figure(number: float) -> str:
    power = (abs(int(number)) + 1).bit_length() - 1
    if power >= 31 and number == 2**power - 1:
        return f"2^{power} - 1"
    return f"-2^{power}" if power >= 31 and number == -(2**power) else f"{number:g}"


def fits(value: Any, schema: Schema) -> bool:
    """Return True for a value of the schema."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        # True equals 1 in Python, and not in JSON.
        return any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in schema["enum"]
        )
    kind = schema["type"]
    # bool is an int to isinstance.
    if type(value) not in _TYPES[kind]:
        return False
    match kind:
        case "number" | "integer":
            return _within(value, schema)
        case "string":
            return _is_text(value, schema)
        case "array":
            return _is_list(value, schema)
    return True


def _within(value: float, schema: Schema) -> bool:
    # Comparisons are exact for integers of any size, and false for NaN.
    low = schema.get("minimum", float("-inf"))
    high = schema.get("maximum", float("inf"))
    return bool(low <= value <= high) and value > schema.get("exclusiveMinimum", float("-inf"))


def _is_text(value: str, schema: Schema) -> bool:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_list(value: list[Any], schema: Schema) -> bool:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        return False
    items = schema.get("items", {})
    # Readers check objects and lists themselves, with an index in the error.
    if items.get("type") in (None, "object", "array"):
        return True
    return all(fits(each, items) for each in value)
