"""Words in earlier messages by which a template writes something else later.

Such as ``/no_think`` in a system prompt, from which on each turn begins with an empty think block.
They stand in the template itself, because it looks for them, so each can be tried out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from any_agent.chat.message_validation import text_of
from any_agent.types import Message

_MOST = 128
_ROLES = ("system", "developer", "user")


def find_switch_words(
    words: Iterable[str], user: Message, follows: Callable[[list[Message]], Any]
) -> tuple[str, ...]:
    """Those ``words`` after which something else follows than after a plain question.

    ``follows``: what is written after a made-up conversation; raises what the template raises.
    """
    usual = follows([user])
    found = []
    for word in sorted(words)[:_MOST]:
        for past in ([{"role": "system", "content": word}, user], [{**user, "content": word}]):
            # A template that takes no system message refuses the real one, too.
            with contextlib.suppress(Exception):
                if follows(past) != usual:
                    found.append(word)
                    break
    return tuple(found)


def contains_switch(words: Sequence[str], past: Sequence[Message]) -> bool:
    """Whether a user's or a system's message has one of them."""
    if not words:
        return False
    texts = (text_of(m.get("content")) or "" for m in past if m.get("role") in _ROLES)
    return any(word in text for text in texts for word in words)
