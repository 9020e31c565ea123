"""The form that an answer's text must have, as a grammar for the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from any_agent.completions.json_body import is_deeper
from any_agent.completions.params.parameter import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from any_agent.completions.params.schema_check import check, json_text, require_object, shown
from any_agent.completions.params.schema_parts import unknown_formats, without_unknown_formats
from any_agent.completions.params.table import TABLE
from any_agent.completions.params.unknown_fields import UnknownFields
from any_agent.errors import InvalidRequest, UnsupportedParameter

_STRUCTURED = ("json", "regex", "choice", "json_object")


def grammar_of(body: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the JSON text of one of ``json_schema``, ``json_object``, ``regex``, and the parameter
    that requests it; None where any text is allowed.

    Values of plain types must be checked already.
    """
    found = {
        "response_format": _response_format(body.get("response_format")),
        "structured_outputs": _structured(body.get("structured_outputs")),
    }
    for name in ("guided_json", "guided_regex", "guided_choice", "regex"):
        value = body.get(name)
        found[name] = None if value is None else _one(name.removeprefix("guided_"), value, name)
    given = [name for name, grammar in found.items() if grammar is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} contradict each other", param=given[1])
    return (found[given[0]], given[0]) if given else (None, None)


def format_part(grammar: str) -> dict[str, Any]:
    """Return a grammar as a part of a structural tag."""
    given = json.loads(grammar)
    if "regex" in given:
        return {"type": "regex", "pattern": given["regex"]}
    return {"type": "json_schema", "json_schema": given.get("json_schema", {"type": "object"})}


def unless_forced(
    grammar: str | None, asked_by: str | None, forced: str | None, rest: UnknownFields
) -> tuple[str | None, str | None]:
    """Return the grammar and its parameter; for a forced call neither, and ``rest`` notes that."""
    if grammar is None or asked_by is None or forced is None:
        return grammar, asked_by
    rest.ignored.append(asked_by)
    return None, None


def _response_format(value: Any) -> str | None:
    name = "response_format"
    if value is None:
        return None
    match require_object(value, name).get("type"):
        case "text":
            return None
        case "json_object":
            return grammar_text({"json_object": True}, name)
        case "json_schema":
            wanted = require_object(value.get("json_schema"), f"{name}.json_schema")
            schema = wanted.get("schema")
            # OpenAI allows a missing schema: any object fits then.
            return (
                grammar_text({"json_object": True}, name)
                if schema is None
                else schema_grammar(schema, name, strict=wanted.get("strict") is True)
            )
        case str():
            raise UnsupportedParameter(
                "response_format must be text, json_object or json_schema", param=name
            )
    raise InvalidRequest("response_format must have a type", param=name)


def _structured(value: Any) -> str | None:
    name = "structured_outputs"
    if value is None:
        return None
    given = {k: v for k, v in require_object(value, name).items() if v not in (None, False)}
    unknown = given.keys() - set(_STRUCTURED)
    if unknown or len(given) > 1:
        raise UnsupportedParameter(f"{name} may have one of {', '.join(_STRUCTURED)}", param=name)
    for kind, wanted in given.items():
        return _one(kind, wanted, name)
    return None


def _one(kind: str, value: Any, name: str) -> str:
    match kind:
        case "json":
            return schema_grammar(_parsed(value, name), name)
        case "regex":
            check(value, TABLE["chat"]["guided_regex"].schema, name)
            return grammar_text({"regex": value}, name)
        case "choice":
            check(value, TABLE["chat"]["guided_choice"].schema, name)
            choices = "|".join(re.sub(r"([\\.^$|?*+()\[\]{}])", r"\\\1", c) for c in value)
            return grammar_text({"regex": f"({choices})"}, name)
    return grammar_text({"json_object": True}, name)


def _parsed(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{name} must be JSON", param=name) from None


def schema_grammar(schema: Any, name: str, *, strict: bool = False) -> str:
    """Return a JSON schema's grammar; InvalidRequest, under this name, for a wrong schema.

    A format of texts that no grammar enforces is an annotation, as JSON Schema has it, and left
    out; UnsupportedParameter where the agent asks for a ``strict`` schema.
    """
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the schema of {name} must be an object", param=name)
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise InvalidRequest(f"{name} is nested deeper than {MAX_SCHEMA_DEPTH} levels", param=name)
    if formats := unknown_formats(schema):
        if strict:
            raise UnsupportedParameter(
                f"{name} is strict, and no grammar enforces its format {shown(formats[0])}: leave "
                "out the format, or strict",
                param=name,
            )
        schema = without_unknown_formats(schema)
    return grammar_text({"json_schema": schema}, name)


def grammar_text(grammar: dict[str, Any], name: str) -> str:
    """Return a grammar as an engine takes it."""
    return json_text(grammar, name, longest=MAX_SCHEMA_BYTES)
