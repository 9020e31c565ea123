"""Which tools the model is told of, and whether it has to call one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from any_agent.completions.params.parameter import MAX_TOOLS, MAX_TOOLS_BYTES
from any_agent.completions.params.schema_check import json_text, shown
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import Tool

MAX_NAME = 256


def tools_of(body: Mapping[str, Any]) -> tuple[list[Tool] | None, str | None]:
    """The tools to render, and the one that must be called ("" for any; None: no need)."""
    tools = _checked(body.get("tools"))
    names = [tool["function"]["name"] for tool in tools]
    choice = body.get("tool_choice")
    match choice:
        case None | "auto":
            return tools or None, None
        case "none":
            return None, None
        case "required":
            return tools, _forced(names)
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise _wrong(f"tool_choice names {shown(name)}, which is none of the tools")
            return tools, name
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return _allowed(tools, allowed)
        case {"type": "custom"}:
            raise UnsupportedParameter(
                "tool_choice: custom tools are not supported; use functions", param="tool_choice"
            )
    raise _wrong(
        'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": '
        '...}} or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
    )


def _allowed(tools: list[Tool], allowed: dict[str, Any]) -> tuple[list[Tool] | None, str | None]:
    entries, mode = allowed.get("tools"), allowed.get("mode")
    if not isinstance(entries, list) or mode not in ("auto", "required"):
        raise _wrong('allowed_tools must have a mode, "auto" or "required", and a list of tools')
    known = {tool["function"]["name"] for tool in tools}
    wanted = set()
    for entry in entries:
        match entry:
            case {"type": "function", "function": {"name": str(name)}} if name in known:
                wanted.add(name)
            case _:
                raise _wrong("allowed_tools has an entry that is none of the tools")
    left = [tool for tool in tools if tool["function"]["name"] in wanted]
    if mode == "auto":
        return left or None, None
    return left, _forced([tool["function"]["name"] for tool in left])


def _forced(names: list[str]) -> str:
    if not names:
        raise _wrong("tool_choice asks for a call, but there are no tools")
    return names[0] if len(names) == 1 else ""


def _checked(tools: Any) -> list[Tool]:
    if tools is None or tools == []:
        return []
    if not isinstance(tools, list):
        raise InvalidRequest("tools must be a list", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"there are {len(tools)} tools, and there may be {MAX_TOOLS}: leave some out",
            param="tools",
        )
    seen: set[str] = set()
    for k, tool in enumerate(tools):
        name = _name(tool, f"tools[{k}]")
        if name in seen:
            raise InvalidRequest(
                f"tools[{k}] is the second one called {shown(name)}: a call could not be told "
                "which it means",
                param="tools",
            )
        seen.add(name)
    json_text(tools, "tools", longest=MAX_TOOLS_BYTES)
    return tools


def _name(tool: Any, where: str) -> str:
    """The name of a function; anything goes that is no empty, endless or unprintable text."""
    if isinstance(tool, dict) and tool.get("type") == "custom":
        raise UnsupportedParameter(
            f"{where} is a custom tool: only functions are supported", param="tools"
        )
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(name, str)
        or tool.get("type") != "function"
    ):
        raise InvalidRequest(
            f'{where} must be {{"type": "function", "function": {{"name": ...}}}}', param="tools"
        )
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise InvalidRequest(
            f"{where}.function.name must be 1 to {MAX_NAME} printable characters",
            param="tools",
        )
    if not isinstance(function.get("parameters", {}), dict | None):
        raise InvalidRequest(f"{where}.function.parameters must be an object", param="tools")
    return name


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tool_choice")
