"""Made-up turns by which a template tells what it writes between two: see `bridge`."""

from __future__ import annotations

from any_agent.types import Message, Tool

SAID = "any0agent0said"
"""The made-up answer; a word that no template writes itself."""
THOUGHT = "any0agent0thought"


def _tool(name: str) -> Tool:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": f"To {name}.", "parameters": schema},
    }


def _called(calls: list[tuple[str, str]], said: str = "x") -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": {"a": said}}}
            for id, name in calls
        ],
    }


USER: Message = {"role": "user", "content": "ok"}
TOOLS: tuple[list[Tool], ...] = ([_tool("ok0")], [_tool("ok0"), _tool("other0")])
PASTS: tuple[list[Message], ...] = (
    [USER],
    [{"role": "system", "content": "be"}, USER],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, USER],
    [
        {"role": "user", "content": "a"},
        _called([("call00000", "ok0")]),
        {"role": "tool", "tool_call_id": "call00000", "name": "ok0", "content": "r"},
        {"role": "assistant", "content": "b"},
        USER,
    ],
)
"""Conversations before the made-up answer: what follows it must be the same after each."""


def probe_answer(calls: list[tuple[str, str]]) -> Message:
    """The made-up answer: a text, or calls of these ids and names."""
    return _called(calls, SAID) if calls else {"role": "assistant", "content": SAID}


def probe_answer_for(said: Message | None, new: list[Message]) -> Message:
    """An answer that the new messages may follow: results need calls, by id and name."""
    calls: list[tuple[str, str]] = []
    for n, call in enumerate((said or {}).get("tool_calls") or ()):
        calls.append((str(call.get("id") or f"call{n}aaaa"), str(call["function"]["name"])))
    if said is None:
        for n, message in enumerate(new):
            if message["role"] != "tool":
                break
            id = message.get("tool_call_id") or f"call{n}aaaa"
            calls.append((id, message.get("name") or "ok0"))
    return probe_answer(calls)


def probe_messages(roles: tuple[str, ...], calls: list[tuple[str, str]]) -> list[Message]:
    """Messages of these roles after an answer with ``calls``; "calling" is an answer with one."""
    new: list[Message] = []
    open_calls = list(calls)
    for n, role in enumerate(roles):
        word = f"any0new{n}"
        if role == "calling":
            open_calls = [(f"call{n}bbbb", "ok0")]
            new.append(_called(open_calls, word))
        elif role == "tool":
            id, name = open_calls.pop(0) if open_calls else (f"call{n}cccc", "ok0")
            new.append({"role": role, "tool_call_id": id, "name": name, "content": word})
        else:
            new.append({"role": role, "content": word})
    return new
