"""Made-up turns that show what a template writes between two turns, for :mod:`.bridge`."""

from __future__ import annotations

from typing import Any

from any_agent.types import Message, Tool

PROBE_ANSWER = "any0agent0said"  # the made-up answer; a word that no template writes itself
PROBE_REASONING = "any0agent0thought"
CONTINUATION_EXAMPLES: dict[str, dict[str, Any]] = {
    "a user's message after an answer": {"roles": ("user",)},
    "a tool's result after a call": {"roles": ("tool",), "calls": 1, "tools": True},
    "several tools' results": {"roles": ("tool", "tool"), "calls": 2, "tools": True},
    "a result and a user's message": {"roles": ("tool", "user"), "calls": 1, "tools": True},
    "a system message on the way": {"roles": ("system", "user")},
    "an answer among the new messages": {"roles": ("user", "assistant", "user")},
}
"""New messages that agents send between two answers, by name: arguments of
:meth:`~any_agent.chat.bridge.TemplateRenderer.check_continuation`."""


def _tool(name: str) -> Tool:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": f"To {name}.", "parameters": schema},
    }


def _calling(calls: list[tuple[str, str]], argument: str = "x") -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": {"a": argument}}}
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
        _calling([("call00000", "ok0")]),
        {"role": "tool", "tool_call_id": "call00000", "name": "ok0", "content": "r"},
        {"role": "assistant", "content": "b"},
        USER,
    ],
)
"""Conversations before the made-up answer; what follows it must be the same after each."""


def probe_answer(calls: list[tuple[str, str]]) -> Message:
    """Return the made-up answer: a text, or calls of these ids and names."""
    return (
        _calling(calls, PROBE_ANSWER) if calls else {"role": "assistant", "content": PROBE_ANSWER}
    )


def probe_answer_for(answer: Message | None, new: list[Message]) -> Message:
    """Return an answer that the new messages may follow: results need calls, by id and name."""
    calls: list[tuple[str, str]] = []
    for n, call in enumerate((answer or {}).get("tool_calls") or ()):
        calls.append((str(call.get("id") or f"call{n}aaaa"), str(call["function"]["name"])))
    if answer is None:
        for n, message in enumerate(new):
            if message["role"] != "tool":
                break
            id = message.get("tool_call_id") or f"call{n}aaaa"
            calls.append((id, message.get("name") or "ok0"))
    return probe_answer(calls)


def probe_messages(roles: tuple[str, ...], calls: list[tuple[str, str]]) -> list[Message]:
    """Return messages of these roles after an answer with ``calls``.

    The role "calling" stands for an answer with one call.
    """
    new: list[Message] = []
    open_calls = list(calls)
    for n, role in enumerate(roles):
        word = f"any0new{n}"
        if role == "calling":
            open_calls = [(f"call{n}bbbb", "ok0")]
            new.append(_calling(open_calls, word))
        elif role == "tool":
            id, name = open_calls.pop(0) if open_calls else (f"call{n}cccc", "ok0")
            new.append({"role": role, "tool_call_id": id, "name": name, "content": word})
        else:
            new.append({"role": role, "content": word})
    return new
