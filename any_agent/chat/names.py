"""The roles whose messages' names a renderer leaves out of the prompt.

Some frameworks give names to messages, also to answers that they return (LangChain's agents). A
name that no prompt shows makes no other conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from any_agent.chat import format_probes as probes
from any_agent.chat.system_messages import Render
from any_agent.types import Message

_NAME = "any0name"
_RESULT = {k: v for k, v in probes.result(1, "3").items() if k != "name"}
_TALKS: tuple[list[Message], ...] = (
    [
        probes.SYSTEM,
        probes.USER,
        probes.REASONED,
        probes.NEXT,
        probes.TEXT_AND_CALL,
        _RESULT,
        probes.TEXT,
        probes.NEXT,
    ],
    [probes.SYSTEM, probes.USER],
    [probes.USER, probes.TEXT, probes.NEXT],
    [probes.USER, probes.CALLED, _RESULT],
)


def nameless_roles(render: Render) -> frozenset[str]:
    """Return the roles whose messages are rendered alike with a name and without one.

    A role that the renderer takes in no conversation is not among them.
    """
    seen, shown = set[str](), set[str]()
    for messages in _TALKS:
        for tools in (None, probes.TOOLS):
            try:
                plain = render(messages, tools)
            except Exception:
                continue
            for role in {str(m["role"]) for m in messages} - shown:
                seen.add(role)
                try:
                    if render(_named(messages, role), tools) != plain:
                        shown.add(role)
                except Exception:
                    # A name that is refused is not ignored, either.
                    shown.add(role)
    return frozenset(seen - shown)


def _named(messages: Sequence[Message], role: str) -> list[Message]:
    return [{**m, "name": _NAME} if m["role"] == role else m for m in messages]
