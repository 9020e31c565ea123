"""Custom tools, whose input is free text: the functions that the model sees in their place.

No answer under a grammar is trained on, so a grammar of the input is not enforced: the model reads
it in the function's description.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from any_agent.completions.params.schema_check import shown
from any_agent.completions.params.tools import tool_list
from any_agent.completions.params.unknown_fields import UnknownFields
from any_agent.custom_calls import CUSTOM, custom_call, is_custom
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import Message, Tool

Formats: TypeAlias = Mapping[str, Any]
"""The format of each custom tool's input in the flat form, None for any text, by its name."""

_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}
_GRAMMAR_FIELDS = ("syntax", "definition")


def function_of(given: Any, where: str) -> Tool:
    """Return the function that the model sees; ``given``: the flat form. InvalidRequest."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise _wrong(where, 'must have a name: {"type": "custom", "name": ..., "format": ...}')
    description = given.get("description")
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{where}.description", "must be a string")
    _check_format(given.get("format"), f"{where}.format")
    texts = [description, _grammar_text(given.get("format"))]
    function = {"name": given["name"], "description": "\n\n".join(filter(None, texts))}
    return {"type": "function", "function": {**function, "parameters": _INPUT}}


def flat_custom(function: Mapping[str, Any], format: Any) -> dict[str, Any]:
    """Return the custom tool of a function from :func:`function_of`, as an answer repeats it."""
    text, grammar = function.get("description") or "", _grammar_text(format)
    description = text.removesuffix(grammar).removesuffix("\n\n") if grammar else text
    return {
        "type": CUSTOM,
        "name": function["name"],
        "description": description or None,
        "format": format or {"type": "text"},
    }


def with_functions(given: Any) -> tuple[list[Any], Formats]:
    """Return a chat call's tools with functions for the custom ones, and the formats of these."""
    tools, formats = [], {}
    for k, tool in enumerate(tool_list(given)):
        if not is_custom(tool):
            tools.append(tool)
            continue
        where = f"tools[{k}].custom"
        custom = tool.get(CUSTOM)
        if isinstance(custom, dict):
            custom = {**custom, "format": _flat_format(custom.get("format"), f"{where}.format")}
        function = function_of(custom, where)
        formats[function["function"]["name"]] = custom["format"]
        tools.append(function)
    return tools, formats


def shown_of(tools: Iterable[Tool] | None, formats: Formats, rest: UnknownFields) -> Formats:
    """Return the formats of the tools that are shown; note `tools.format` if one is a grammar."""
    names = [tool["function"]["name"] for tool in tools or ()]
    out = {name: formats[name] for name in names if name in formats}
    if any(map(_grammar_text, out.values())):
        rest.ignored.append("tools.format")
    return out


def with_custom_calls(messages: list[Message]) -> list[Message]:
    """Return a chat conversation whose custom calls have our own form.

    InvalidRequest names the call that is wrong.
    """
    return [
        {**message, "tool_calls": [_call(call, k, j) for j, call in enumerate(calls)]}
        if isinstance(message, dict)
        and isinstance(calls := message.get("tool_calls"), list)
        and any(map(is_custom, calls))
        else message
        for k, message in enumerate(messages)
    ]


def _call(call: Any, message: int, index: int) -> Any:
    if not is_custom(call) or "function" in call:
        # Records have our own form.
        return call
    match call.get(CUSTOM):
        case {"name": str(name), "input": str(text)}:
            return custom_call(call.get("id"), name, text)
    where = f"messages[{message}].tool_calls[{index}].custom"
    raise InvalidRequest(f'{where} must be {{"name": ..., "input": "..."}}', param=where)


def _flat_format(given: Any, where: str) -> Any:
    """Return a chat call's format in the flat form."""
    match given:
        case {"type": "grammar", "grammar": dict(grammar)}:
            return {"type": "grammar", **{part: grammar.get(part) for part in _GRAMMAR_FIELDS}}
        case {"type": "grammar"}:
            raise _wrong(where, 'must have a grammar: {"syntax": ..., "definition": ...}')
    return given


def _check_format(given: Any, where: str) -> None:
    match given:
        case None | {"type": "text"}:
            return
        case {"type": "grammar", "syntax": "lark" | "regex", "definition": str()}:
            return
        case {"type": "grammar"}:
            raise _wrong(where, "must have a syntax, lark or regex, and a definition")
        case {"type": str(kind)}:
            raise UnsupportedParameter(
                f"{where} must be text or grammar, and is {shown(kind)}", param="tools"
            )
    raise _wrong(where, 'must be {"type": "text"} or {"type": "grammar", ...}')


def _grammar_text(format: Any) -> str:
    if not isinstance(format, dict) or format.get("type") != "grammar":
        return ""
    return f"The input has this format ({format['syntax']}):\n{format['definition']}"


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}", param="tools")
