"""Anthropic's `tools` and `tool_choice` in chat's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from any_agent.completions.params.schema_check import shown
from any_agent.completions.params.tools import MAX_NAME, tools_of
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import Tool


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that the model may call, and how."""

    rendered: list[Tool] | None
    """The tools that the prompt shows."""
    forced: str | None
    """The tool that must be called, "" for any; None where none must be."""
    parallel: bool


def messages_tools(body: Mapping[str, Any]) -> Tools:
    """Return a request's tools; InvalidRequest or UnsupportedParameter names what is wrong."""
    given = body.get("tools")
    if given is not None and not isinstance(given, list):
        raise InvalidRequest("tools must be a list", param="tools")
    tools = [_tool(tool, f"tools[{k}]") for k, tool in enumerate(given or ())]
    choice, parallel = _choice(body.get("tool_choice"))
    rendered, forced = tools_of({"tools": tools, "tool_choice": choice})
    return Tools(rendered, forced, parallel)


def _tool(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict):
        _wrong(where, "must be an object")
    name, kind, schema = tool.get("name"), tool.get("type"), tool.get("input_schema")
    if schema is None and kind not in (None, "custom"):
        raise UnsupportedParameter(
            f"{where} is {shown(kind)}, one of Anthropic's own tools, which do not run here: "
            "give it a name, a description and an input_schema, and run it in the agent",
            param="tools",
        )
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        _wrong(f"{where}.name", f"must be 1 to {MAX_NAME} printable characters")
    if not isinstance(schema, dict):
        _wrong(f"{where}.input_schema", "must be an object: the JSON schema of the tool's input")
    callers = tool.get("allowed_callers")
    if isinstance(callers, list) and callers and "direct" not in callers:
        raise UnsupportedParameter(
            f"{where} may not be called directly, and there is no code execution here",
            param="tools",
        )
    function = {"name": name}
    description = tool.get("description")
    if description is not None:
        if not isinstance(description, str):
            _wrong(f"{where}.description", "must be a string")
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": schema}}


def _choice(choice: Any) -> tuple[Any, bool]:
    """Return chat's `tool_choice`, and True if several calls may be made."""
    if choice is None:
        return None, True
    if not isinstance(choice, dict):
        _wrong_choice()
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        raise InvalidRequest(
            "tool_choice.disable_parallel_tool_use must be true or false", param="tool_choice"
        )
    match choice:
        case {"type": "auto"}:
            return "auto", not alone
        case {"type": "any"}:
            return "required", not alone
        case {"type": "none"}:
            return "none", True
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, not alone
    _wrong_choice()


def _wrong_choice() -> NoReturn:
    raise InvalidRequest(
        'tool_choice must be {"type": "auto"}, {"type": "any"}, {"type": "none"} or '
        '{"type": "tool", "name": ...}',
        param="tool_choice",
    )


def _wrong(where: str, what: str) -> NoReturn:
    raise InvalidRequest(f"{where} {what}", param="tools")
