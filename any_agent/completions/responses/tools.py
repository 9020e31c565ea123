"""Tools as Responses has them, flat, and as a chat call has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from any_agent.completions.params.rows import MAX_TOOLS
from any_agent.completions.params.tools import tools_of
from any_agent.completions.params.values import shown
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import Tool

_FIELDS = ("description", "parameters", "strict")


def chat_tools_of(body: Mapping[str, Any]) -> tuple[list[Tool], list[Tool] | None, str | None]:
    """All tools in a chat call's form, those to render, and the one that must be called."""
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequest("tools must be a list", param="tools")
    if len(tools or ()) > MAX_TOOLS:
        raise InvalidRequest(
            f"there are {len(tools or ())} tools, and there may be {MAX_TOOLS}: leave some out",
            param="tools",
        )
    chat = [_nested(tool, f"tools[{k}]") for k, tool in enumerate(tools or ())]
    shown_tools, forced = tools_of({"tools": chat, "tool_choice": _choice(body.get("tool_choice"))})
    return chat, shown_tools, forced


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
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools"}:
            tools = choice.get("tools")
            entries = [_entry(each) for each in tools] if isinstance(tools, list) else tools
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


def _entry(entry: Any) -> Any:
    match entry:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return None
