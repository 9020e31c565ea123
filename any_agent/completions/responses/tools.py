"""The tools of a `/v1/responses` call, and the choice among them, in a chat call's form.

Tools are flat there, and may stand in groups, `namespace`s, whose tools the model sees under names
such as `mcp__files__read`: the group's, two underscores, and the tool's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from any_agent.completions.params.custom_tools import Formats, flat_custom, function_of, shown_of
from any_agent.completions.params.hosted_tools import MAX_KIND, leave_out, without_effect
from any_agent.completions.params.parameter import MAX_TOOLS
from any_agent.completions.params.schema_check import require_names, shown
from any_agent.completions.params.tools import note_strict, tool_list, tools_of
from any_agent.completions.params.unknown_fields import UnknownFields
from any_agent.completions.responses.input_items import full_name
from any_agent.custom_calls import CUSTOM
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import Tool

NAMESPACES = "namespaces"
"""The entry of a record with :attr:`ResponsesTools.groups`."""
CUSTOM_FORMATS = "custom_formats"
"""The entry of a record with :attr:`ResponsesTools.custom`."""

Names = Mapping[str, tuple[str, str]]
"""The group and the own name of each function that stands in a group, by its full name."""

_FIELDS: dict[str, tuple[type, str]] = {
    "description": (str, "a string"),
    "parameters": (dict, "an object"),
    "strict": (bool, "true or false"),
}
_HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
    "programmatic_tool_calling",
)
"""Kinds of tools that OpenAI runs itself; dated names such as web_search_preview, too."""


@dataclass(slots=True)
class ResponsesTools:
    """A request's tools."""

    chat: list[Tool] = field(default_factory=list)
    """All functions, in a chat call's form."""
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The group and the own name of each function that stands in a group, by its full name."""
    descriptions: dict[str, str] = field(default_factory=dict)
    """The groups' descriptions."""
    custom: Formats = field(default_factory=dict)
    """The formats of custom tools' inputs, by their full names; in the end of those shown."""
    shown: list[Tool] | None = None
    """The functions to render."""
    forced: str | None = None
    """The function that must be called ("": any; None: not needed)."""
    repeated: list[dict[str, Any]] = field(default_factory=list)
    """The tools as the answer repeats them."""
    choice: Any = None
    """The choice as the answer repeats it."""
    left_out: dict[str, list[Any]] = field(default_factory=dict)
    """The tools, by kind, that nobody runs here."""
    deferred: bool = False
    """True if a function was to be shown only once it is searched for."""

    @property
    def groups(self) -> list[list[Any]]:
        """The runs of shown functions of one group: its name, description, start and length."""
        out: list[list[Any]] = []
        before = None
        for k, tool in enumerate(self.shown or ()):
            group, _ = self.names.get(tool["function"]["name"], (None, ""))
            if group is not None and group == before:
                out[-1][3] += 1
            elif group is not None:
                out.append([group, self.descriptions[group], k, 1])
            before = group
        return out


def responses_tools(
    body: Mapping[str, Any], rest: UnknownFields, *, refuse: bool
) -> ResponsesTools:
    """Return a request's tools, its input's among them.

    Tools that only OpenAI runs are noted in ``rest`` as ignored, or refused. Raises InvalidRequest
    or UnsupportedParameter.
    """
    found = ResponsesTools()
    for k, tool in enumerate(tool_list(body.get("tools"))):
        found.repeated += _add(found, tool, f"tools[{k}]")
    _add_from_input(found, body.get("input"))
    choice = _choice(body.get("tool_choice"))
    leave_out(found.left_out, rest, refuse=refuse)
    if found.deferred:
        without_effect("tools.defer_loading", True, rest, refuse=refuse)
    asked = {"tools": found.chat, "tool_choice": choice}
    found.shown, found.forced = tools_of(asked, found.custom)
    found.custom = shown_of(found.shown, found.custom, rest)
    found.choice = _flat_choice(choice, found.names)
    note_strict(found.shown or (), rest)
    return found


def flat(tools: Sequence[Tool] | None, custom: Formats) -> list[dict[str, Any]]:
    """Return functions and custom tools as an answer repeats them."""
    functions = [tool["function"] for tool in tools or ()]
    return [
        flat_custom(f, custom[f["name"]])
        if f["name"] in custom
        else {"type": "function", "name": f["name"], **{part: f.get(part) for part in _FIELDS}}
        for f in functions
    ]


def names_of(tools: Sequence[Tool] | None, groups: Sequence[Sequence[Any]]) -> Names:
    """Return the group and the own name of each function of a group, by its full name."""
    full = [tool["function"]["name"] for tool in tools or ()]
    return {
        name: (group, name[len(full_name(group, "")) :])
        for group, _, start, count in groups
        for name in full[start : start + count]
    }


def flat_tools(
    tools: Sequence[Tool] | None, groups: Sequence[Sequence[Any]], custom: Formats
) -> list[Any]:
    """Return functions, custom tools, and namespaces of them, as an answer repeats them."""
    out: list[Any] = flat(tools, custom)
    names = names_of(tools, groups)
    for group, description, start, count in reversed(groups):
        inner = out[start : start + count]
        inner = [{**each, "name": names[each["name"]][1]} for each in inner]
        out[start : start + count] = [
            {"type": "namespace", "name": group, "description": description, "tools": inner}
        ]
    return out


def own_call(call: dict[str, Any], names: Names) -> dict[str, Any]:
    """Return a call with the function's own name, and with its `namespace` if it has one."""
    known = names.get(call["function"]["name"]) if names else None
    if known is None:
        return call
    return {**call, "namespace": known[0], "function": {**call["function"], "name": known[1]}}


def _add(found: ResponsesTools, tool: Any, where: str) -> list[dict[str, Any]]:
    """Add a tool; return what the answer repeats of it."""
    if not isinstance(tool, dict) or tool.get("type") != "namespace":
        function = _nested(found, tool, where)
        if function is None:
            return []
        return _shown(found, tool, function, function["function"]["name"])
    require_names(tool, where, ("type", "name", "description", "tools"))
    group, inner = tool.get("name"), tool.get("tools")
    if not isinstance(group, str) or not group or not isinstance(inner, list):
        raise InvalidRequest(
            f'{where} must be {{"type": "namespace", "name": ..., "tools": [...]}}', param="tools"
        )
    if tool.get("description") is not None and not isinstance(tool["description"], str):
        raise InvalidRequest(f"{where}.description must be a string", param="tools")
    found.descriptions[group] = description = tool.get("description") or ""
    own = []
    for k, each in enumerate(inner):
        function = _nested(found, each, f"{where}.tools[{k}]")
        if function is None:
            continue
        name = function["function"]["name"]
        full = full_name(group, name)
        found.names[full] = (group, name)
        own += _shown(found, each, function, full)
        tool_list(found.chat)
    return [{"type": "namespace", "name": group, "description": description, "tools": own}]


def _shown(
    found: ResponsesTools, tool: Mapping[str, Any], function: Tool, full: str
) -> list[dict[str, Any]]:
    """Add a tool's function under its full name; return what the answer repeats of the tool."""
    found.chat.append({**function, "function": {**function["function"], "name": full}})
    if tool["type"] != CUSTOM:
        return flat([function], {})
    found.custom = {**found.custom, full: tool.get("format")}
    return flat([function], {function["function"]["name"]: tool.get("format")})


def _add_from_input(found: ResponsesTools, given: Any) -> None:
    """Add the tools that stand in the input; those that are there already change nothing."""
    if not isinstance(given, list):
        return
    known = {each["function"]["name"]: each for each in found.chat}
    for k, item in enumerate(given):
        if not isinstance(item, dict) or item.get("type") != "additional_tools":
            continue
        where = f"input[{k}].tools"
        more = ResponsesTools()
        for j, tool in enumerate(tool_list(item.get("tools"))):
            _add(more, tool, f"{where}[{j}]")
        new = [each for each in more.chat if known.get(each["function"]["name"]) != each]
        found.chat += new
        tool_list(found.chat)
        names = {each["function"]["name"]: each for each in new}
        known |= names
        found.custom = {**found.custom, **{n: f for n, f in more.custom.items() if n in names}}
        found.names |= more.names
        for group, description in more.descriptions.items():
            found.descriptions.setdefault(group, description)
        found.deferred |= more.deferred
        for kind, tools in more.left_out.items():
            found.left_out.setdefault(kind, []).extend(tools)


def _nested(found: ResponsesTools, tool: Any, where: str) -> Tool | None:
    """Return a tool's function in a chat call's form; None for a tool that nobody runs here."""
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{where} must be an object", param="tools")
    kind = tool.get("type")
    if kind == CUSTOM:
        found.deferred |= bool(tool.get("defer_loading"))
        return function_of(tool, where)
    if kind != "function":
        if not isinstance(kind, str):
            raise InvalidRequest(f'{where} must have the type "function"', param="tools")
        if kind.startswith(_HOSTED):
            found.left_out.setdefault(kind[:MAX_KIND], []).append(tool)
            return None
        raise UnsupportedParameter(
            f"{where} is {shown(kind)}: only functions, custom tools and namespaces of them are "
            "supported; give the model a function that does the same",
            param="tools",
        )
    found.deferred |= bool(tool.get("defer_loading"))
    name = tool.get("name")
    if not isinstance(name, str):
        raise InvalidRequest(
            f'{where} must be {{"type": "function", "name": ..., "parameters": ...}}', param="tools"
        )
    given = {part: tool[part] for part in _FIELDS if tool.get(part) is not None}
    for part, value in given.items():
        wanted, what = _FIELDS[part]
        if not isinstance(value, wanted):
            raise InvalidRequest(f"{where}.{part} must be {what}", param="tools")
    return {"type": "function", "function": {"name": name, **given}}


# -- the choice ------------------------------------------------------------------------------------


def _choice(choice: Any) -> Any:
    """Return the choice in a chat call's form; unknown kinds are refused here or there."""
    if not isinstance(choice, dict):
        return choice
    match choice:
        case {"type": "function" | "custom", "name": str(name)}:
            require_names(choice, "tool_choice", ("type", "name", "namespace"))
            return _function(choice, name)
        case {"type": "allowed_tools"}:
            require_names(choice, "tool_choice", ("type", "mode", "tools"))
            tools = choice.get("tools")
            entries = _entries(tools) if isinstance(tools, list) else tools
            allowed = {"mode": choice.get("mode"), "tools": entries}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case {"type": "function" | "custom" as kind}:
            raise InvalidRequest(
                f'tool_choice must be {{"type": "{kind}", "name": ...}}', param="tool_choice"
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
        case {"type": "function" | "custom", "name": str(name)}:
            require_names(entry, where, ("type", "name", "namespace"))
            return _function(entry, name)
    return None


def _function(choice: Mapping[str, Any], name: str) -> dict[str, Any]:
    group = choice.get("namespace")
    if group is not None and not isinstance(group, str):
        raise InvalidRequest("tool_choice: namespace must be a string", param="tool_choice")
    return {"type": choice["type"], choice["type"]: {"name": full_name(group, name)}}


def _flat_choice(choice: Any, names: Names) -> Any:
    """Return a checked choice in the flat form."""
    match choice:
        case {"type": "function" | "custom"}:
            return _flat_function(choice, names)
        case {"type": "allowed_tools", "allowed_tools": allowed}:
            tools = [_flat_function(each, names) for each in allowed["tools"]]
            return {"type": "allowed_tools", "mode": allowed["mode"], "tools": tools}
    return choice


def _flat_function(choice: dict[str, Any], names: Names) -> dict[str, Any]:
    kind = choice["type"]
    group, name = names.get(choice[kind]["name"], (None, choice[kind]["name"]))
    return {"type": kind, "name": name, **({} if group is None else {"namespace": group})}
