"""Parses `tools` and `tool_choice`, and OpenAI's older `functions` and `function_call`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from any_agent.completions.params.parameter import MAX_TOOLS, MAX_TOOLS_BYTES
from any_agent.completions.params.schema_check import json_text, shown
from any_agent.completions.params.unknown_fields import UnknownFields
from any_agent.errors import InvalidRequest
from any_agent.types import Message, Tool

MAX_NAME = 256


def tools_of(
    body: Mapping[str, Any], custom: Collection[str] = ()
) -> tuple[list[Tool] | None, str | None]:
    """Return the tools to render, and the one that must be called ("": any; None: not needed).

    ``custom``: the names of the functions that stand for custom tools.
    """
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
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return _allowed(tools, allowed, custom)
    if (chosen := _chosen(choice)) is not None:
        name, is_custom = chosen
        if name not in names:
            raise _wrong(f"tool_choice names {shown(name)}, which is not one of the tools")
        if (name in custom) != is_custom:
            kind = "function" if is_custom else "custom"
            raise _wrong(f'tool_choice: the type of the tool {shown(name)} is "{kind}"')
        return tools, name
    raise _wrong(
        'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": '
        '...}}, {"type": "custom", "custom": {"name": ...}} or {"type": "allowed_tools", '
        '"allowed_tools": {"mode": ..., "tools": [...]}}'
    )


def _chosen(choice: Any) -> tuple[str, bool] | None:
    """Return the name in a choice, and True for a custom tool's; None for another form."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name, False
        case {"type": "custom", "custom": {"name": str(name)}}:
            return name, True
    return None


def _allowed(
    tools: list[Tool], allowed: dict[str, Any], custom: Collection[str]
) -> tuple[list[Tool] | None, str | None]:
    entries, mode = allowed.get("tools"), allowed.get("mode")
    if not isinstance(entries, list) or mode not in ("auto", "required"):
        raise _wrong('allowed_tools must have a mode, "auto" or "required", and a list of tools')
    known = {(name := tool["function"]["name"], name in custom) for tool in tools}
    wanted = {_chosen(entry) for entry in entries}
    if not wanted <= known:
        raise _wrong("allowed_tools has an entry that is not one of the tools")
    left = [tool for tool in tools if (name := tool["function"]["name"], name in custom) in wanted]
    if mode == "auto":
        return left or None, None
    return left, _forced([tool["function"]["name"] for tool in left])


def _forced(names: list[str]) -> str:
    if not names:
        raise _wrong("tool_choice requires a call, but there are no tools")
    return names[0] if len(names) == 1 else ""


def tool_list(tools: Any) -> list[Any]:
    """Return a request's tools; InvalidRequest if they are no list, or too many."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidRequest("tools must be a list", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"there are {len(tools)} tools, and there may be {MAX_TOOLS}: leave some out",
            param="tools",
        )
    return tools


def _checked(given: Any) -> list[Tool]:
    tools = tool_list(given)
    seen: set[str] = set()
    for k, tool in enumerate(tools):
        name = _name(tool, f"tools[{k}]")
        if name in seen:
            raise InvalidRequest(
                f"tools[{k}] is the second one called {shown(name)}: give each a name of its own",
                param="tools",
            )
        seen.add(name)
    json_text(tools, "tools", longest=MAX_TOOLS_BYTES)
    return tools


def _name(tool: Any, where: str) -> str:
    """Return a function's name: any text that is not empty, endless or unprintable."""
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


def note_strict(tools: Iterable[Any], rest: UnknownFields) -> None:
    """Note `tools.strict` as ignored where a tool asks that its calls keep to its schema.

    Only a grammar could enforce that, and no answer under a grammar is trained on.
    """
    functions = (each.get("function", each) for each in tools if isinstance(each, dict))
    if any(isinstance(each, dict) and each.get("strict") is True for each in functions):
        rest.ignored.append("tools.strict")


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="tool_choice")


def functions_of(body: Mapping[str, Any]) -> tuple[list[Tool] | None, str | None]:
    """Return what :func:`tools_of` does, of `functions` and `function_call`.

    Raises InvalidRequest, also where there are tools, too; UnsupportedParameter.
    """
    for name in ("tools", "tool_choice"):
        if body.get(name):
            older = "functions" if body.get("functions") else "function_call"
            raise InvalidRequest(
                f"{older} is the older form of {name}: send tools and tool_choice alone",
                param=older,
            )
    given = body.get("functions") or []
    if not isinstance(given, list):
        raise InvalidRequest("functions must be a list", param="functions")
    for k, each in enumerate(given):
        if not isinstance(each, dict):
            raise InvalidRequest(
                f'functions[{k}] must be {{"name": ..., "parameters": ...}}', param="functions"
            )
    tools = [{"type": "function", "function": each} for each in given]
    choice = _choice(body.get("function_call"))
    try:
        return tools_of({"tools": tools, "tool_choice": choice})
    except InvalidRequest as error:
        message = error.message.replace("tool_choice", "function_call")
        message = message.replace("].function", "]").replace("tools", "functions")
        param = "function_call" if error.param == "tool_choice" else "functions"
        raise type(error)(message, param=param) from None


def asks_for_functions(body: Mapping[str, Any]) -> bool:
    """Return True if the tools, and so the answer's calls, are in the older form."""
    functions, choice = body.get("functions"), body.get("function_call")
    return functions not in (None, []) or choice not in (None, "none", "auto")


def with_tool_calls(messages: list[Message]) -> list[Message]:
    """Return the conversation with older calls and results in the newer form.

    InvalidRequest names the message that is wrong.
    """
    if not any(map(_is_older, messages)):
        return messages
    out: list[Message] = []
    last = None
    for k, message in enumerate(messages):
        if not _is_older(message):
            out.append(message)
        elif message.get("role") == "function":
            # Only the order shows which call it answers.
            answers: dict[str, str] = {} if last is None else {"tool_call_id": last}
            out.append({**message, "role": "tool", **answers})
        else:
            last = f"call_{k}"
            out.append(_called(message, last, f"messages[{k}]"))
    return out


def _is_older(message: Any) -> bool:
    return isinstance(message, dict) and (
        message.get("function_call") is not None or message.get("role") == "function"
    )


def _called(message: Message, id: str, where: str) -> Message:
    call = message["function_call"]
    if message.get("tool_calls"):
        raise InvalidRequest(
            f"{where} has function_call and tool_calls: leave the older one out", param=where
        )
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise InvalidRequest(
            f'{where}.function_call must be {{"name": ..., "arguments": "..."}}',
            param=f"{where}.function_call",
        )
    function = {"name": call["name"], "arguments": call.get("arguments")}
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return {**rest, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def _choice(given: Any) -> Any:
    match given:
        case None | "none" | "auto":
            return given
        case {"name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise InvalidRequest(
        'function_call must be "none", "auto" or {"name": ...}', param="function_call"
    )
