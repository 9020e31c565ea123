"""OpenAI's older `functions` and `function_call`, as the tools that they became."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from any_agent.completions.params.tools import tools_of
from any_agent.errors import InvalidRequest
from any_agent.types import Message, Tool


def functions_of(body: Mapping[str, Any]) -> tuple[list[Tool] | None, str | None]:
    """Return what :func:`tools_of` does, of `functions` and `function_call`.

    Raises InvalidRequest, also where there are tools, too; UnsupportedParameter.
    """
    for name in ("tools", "tool_choice"):
        if body.get(name):
            older = "functions" if body.get("functions") else "function_call"
            raise InvalidRequest(
                f"{older} and {name} are the older and the newer name of one thing: send tools "
                "and tool_choice alone",
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
        said = error.message.replace("tool_choice", "function_call")
        said = said.replace("].function", "]").replace("tools", "functions")
        param = "function_call" if error.param == "tool_choice" else "functions"
        raise type(error)(said, param=param) from None


def asks_for_functions(body: Mapping[str, Any]) -> bool:
    """True if its tools, and so its answer's calls, are in the older form."""
    functions, choice = body.get("functions"), body.get("function_call")
    return functions not in (None, []) or choice not in (None, "none", "auto")


def with_tool_calls(messages: list[Message]) -> list[Message]:
    """The conversation with older calls and results as those of tools; itself if there are none.

    Raises InvalidRequest, naming the message.
    """
    if not any(map(_is_older, messages)):
        return messages
    out: list[Message] = []
    last = None
    for k, message in enumerate(messages):
        if not _is_older(message):
            out.append(message)
        elif message.get("role") == "function":
            # Which call it answers, only the order says.
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
