"""The tools of a `/v1/messages` call, and the choice among them, in a chat call's form.

A tool with `defer_loading` is one that the agent's own search finds: the prompt's head does not
have it, and a `tool_reference` in a tool's result shows it there. So the head, and the recorded ids
after it, stay the same when it is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from any_agent.completions.params.hosted_tools import MAX_KIND, leave_out, without_effect
from any_agent.completions.params.schema_check import shown
from any_agent.completions.params.tools import MAX_NAME, note_strict, tool_list, tools_of
from any_agent.completions.params.unknown_fields import UnknownFields
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import Tool

_SEARCH = "tool_search_tool"
_HOSTED = ("web_search", "web_fetch", "code_execution", "advisor", _SEARCH)
"""Kinds of tools that Anthropic runs itself; their names go on with a date or a variant."""


@dataclass(frozen=True, slots=True)
class MessagesTools:
    """A request's tools."""

    by_name: dict[str, Tool]
    """All functions, in a chat call's form, also where none may be called."""
    shown: list[Tool] | None = None
    """The functions that the prompt's head shows."""
    deferred: list[Tool] = field(default_factory=list)
    """The functions that may be called, and that only a tool's result shows."""
    forced: str | None = None
    """The function that must be called ("": any; None: not needed)."""
    parallel: bool = True
    """True if several calls may be made at once."""


def messages_tools(body: Mapping[str, Any], rest: UnknownFields, *, refuse: bool) -> MessagesTools:
    """Return a request's tools.

    Tools that only Anthropic runs are noted in ``rest`` as ignored, or refused. InvalidRequest or
    UnsupportedParameter names the part that is wrong.
    """
    declared: list[dict[str, Any]] = []
    functions: list[Tool] = []
    left_out: dict[str, list[Any]] = {}
    for k, tool in enumerate(tool_list(body.get("tools"))):
        if (kind := _hosted(tool)) is not None:
            left_out.setdefault(kind[:MAX_KIND], []).append(tool)
            continue
        functions.append(_function(tool, f"tools[{k}]"))
        declared.append(tool)
    deferred = {tool["name"] for tool in declared if tool.get("defer_loading")}
    choice, parallel = _choice(body.get("tool_choice"))
    leave_out(left_out, rest, alone=not functions and choice != "none", refuse=refuse)
    if deferred and any(kind.startswith(_SEARCH) for kind in left_out):
        # Nobody runs the search that would find them.
        without_effect("tools.defer_loading", True, rest, refuse=refuse)
        deferred = set()
    found, forced = tools_of({"tools": functions, "tool_choice": choice})
    by_name = {each["function"]["name"]: each for each in functions}
    if found is None:
        return MessagesTools(by_name, parallel=parallel)
    if len(deferred) == len(by_name):
        raise InvalidRequest(
            "every tool has defer_loading, so the model would see none: leave it out of the one "
            "that searches for the others",
            param="tools",
        )
    note_strict(declared, rest)
    at_once = [each for each in found if each["function"]["name"] not in deferred]
    later = [each for each in found if each["function"]["name"] in deferred]
    return MessagesTools(by_name, at_once, later, forced, parallel)


def _hosted(tool: Any) -> str | None:
    """Return the kind of a tool that Anthropic runs; None for any other."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    is_hosted = isinstance(kind, str) and kind.startswith(_HOSTED)
    return kind if is_hosted and tool.get("input_schema") is None else None


def _function(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict):
        _wrong(where, "must be an object")
    name, kind, schema = tool.get("name"), tool.get("type"), tool.get("input_schema")
    if schema is None and kind not in (None, "custom"):
        raise UnsupportedParameter(
            f"{where} is {shown(kind)}, whose schema only Anthropic's models know: give it a name, "
            "a description and an input_schema, and run it in the agent",
            param="tools",
        )
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        _wrong(f"{where}.name", f"must be 1 to {MAX_NAME} printable characters")
    if not isinstance(schema, dict):
        _wrong(f"{where}.input_schema", "must be an object: the JSON schema of the tool's input")
    if not isinstance(tool.get("defer_loading"), bool | None):
        _wrong(f"{where}.defer_loading", "must be true or false")
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
