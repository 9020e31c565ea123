"""Tools as Responses has them, flat, and as a chat call has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from any_agent.completions.params.parameter import MAX_TOOLS
from any_agent.completions.params.schema_check import shown
from any_agent.completions.params.tools import tools_of
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import Tool

_FIELDS = ("description", "parameters", "strict")


def chat_tools_of(
    body: Mapping[str, Any],
) -> tuple[list[Tool], list[Tool] | None, str | None, Any]:
    """All tools in a chat call's form, those to render, the one that must be called, and the
    choice of them as an answer repeats it."""
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequest("tools must be a list", param="tools")
    if len(tools or ()) > MAX_TOOLS:
        raise InvalidRequest(
            f"there are {len(tools or ())} tools, and there may be {MAX_TOOLS}: leave some out",
            param="tools",
        )
    chat = [_nested(tool, f"tools[{k}]") for k, tool in enumerate(tools or ())]
    choice = _choice(body.get("tool_choice"))
    shown_tools, forced = tools_of({"tools": chat, "tool_choice": choice})
    return chat, shown_tools, forced, _flat_choice(choice)


def flat(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """As an answer repeats them."""
    out = []
    for tool in tools or ():
        function = tool["function"]
        out.append(
            {
                "type": "function",
                "name": function["name"],
                "description": function.get("description"),
                "parameters": function.get("parameters"),
                "strict": function.get("strict"),
            }
        )
    return out


def require_names(given: Mapping[str, Any], at: str, known: tuple[str, ...]) -> None:
    """UnsupportedParameter for a field of another name."""
    for name in given:
        if name not in known:
            where = f"{at}.{shown(str(name))[1:-1]}"
            raise UnsupportedParameter(f"unknown parameter {where}", param=where)


def _nested(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{where} must be an object", param="tools")
    kind = tool.get("type")
    if kind != "function":
        if not isinstance(kind, str):
            raise InvalidRequest(f'{where} must have the type "function"', param="tools")
        raise UnsupportedParameter(
            f"{where} is {shown(kind)}: only functions are supported; give the model a function "
            "that does the same",
            param="tools",
        )
    if tool.get("defer_loading"):
        raise UnsupportedParameter(
            f"{where}.defer_loading is not supported: the model is told of every tool",
            param="tools",
        )
    name = tool.get("name")
    if not isinstance(name, str):
        raise InvalidRequest(
            f'{where} must be {{"type": "function", "name": ..., "parameters": ...}}', param="tools"
        )
    for field, wanted, what in (
        ("description", str, "a string"),
        ("parameters", dict, "an object"),
        ("strict", bool, "true or false"),
    ):
        if tool.get(field) is not None and not isinstance(tool[field], wanted):
            raise InvalidRequest(f"{where}.{field} must be {what}", param="tools")
    given = {field: tool[field] for field in _FIELDS if tool.get(field) is not None}
    return {"type": "function", "function": {"name": name, **given}}


def _choice(choice: Any) -> Any:
    """In a chat call's form; what is none of ours is refused there, or here by its name."""
    if not isinstance(choice, dict):
        return choice
    match choice:
        case {"type": "function", "name": str(name)}:
            require_names(choice, "tool_choice", ("type", "name"))
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools"}:
            require_names(choice, "tool_choice", ("type", "mode", "tools"))
            tools = choice.get("tools")
            entries = _entries(tools) if isinstance(tools, list) else tools
            allowed = {"mode": choice.get("mode"), "tools": entries}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case {"type": "function"}:
            raise InvalidRequest(
                'tool_choice must be {"type": "function", "name": ...}', param="tool_choice"
            )
        case {"type": str(kind)}:
            raise UnsupportedParameter(
                f"tool_choice: {shown(kind)} is not supported; use functions", param="tool_choice"
            )
    raise InvalidRequest("tool_choice must have a type", param="tool_choice")


def _entries(tools: list[Any]) -> list[Any]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tool_choice.tools has {len(tools)} entries, and may have {MAX_TOOLS}: leave some out",
            param="tool_choice",
        )
    return [_entry(each, f"tool_choice.tools[{k}]") for k, each in enumerate(tools)]


def _entry(entry: Any, where: str) -> Any:
    match entry:
        case {"type": "function", "name": str(name)}:
            require_names(entry, where, ("type", "name"))
            return {"type": "function", "function": {"name": name}}
    return None


def _flat_choice(choice: Any) -> Any:
    """Of one in a chat call's form, which was found right."""
    match choice:
        case {"type": "function", "function": function}:
            return {"type": "function", **function}
        case {"type": "allowed_tools", "allowed_tools": allowed}:
            tools = [{"type": "function", **each["function"]} for each in allowed["tools"]]
            return {"type": "allowed_tools", "mode": allowed["mode"], "tools": tools}
    return choice
