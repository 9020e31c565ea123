"""The task of a conversation, computed from the beginning of a call's messages.

Calls of agents that open no sessions are assigned to their rank and task by it. The router and the
ranks compute the same task for every API, without the policy's chat format. Differences of form
(texts in parts, blank lines, an API's name for the system prompt) do not change it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

TASK_PREFIX = "auto-"  # prefix of the names of tasks that were computed from conversations
RANK_DIGITS = 4  # hexadecimal digits after `resp_` and its like that name the id's rank
HEAD = 65_536
"""Characters of a text that are normalized line by line; the rest is taken unchanged, as reading
every line of many megabytes would block the process."""
_SYSTEM = ("system", "developer")
_BILLING = "x-anthropic-billing-header:"
_ANSWER = re.compile(rf"[a-z]+[-_]([0-9a-f]{{{RANK_DIGITS}}})[0-9a-f]+(\.[0-9]+)?")


def task_of(body: Any) -> str:
    """Return the task of a call's conversation, which is equal for equal system prompts (or
    instructions) and first user messages. Accepts any JSON value."""
    body = body if isinstance(body, Mapping) else {}
    given = body.get("messages")
    messages: Sequence[Any] = given if isinstance(given, list) else ()
    if not messages and "input" in body:
        given = body["input"]
        messages = given if isinstance(given, list) else [{"role": "user", "content": given}]
    system = [_text(body[name]) for name in ("instructions", "system") if body.get(name)]
    for message in messages:
        if not (isinstance(message, dict) and message.get("role") in _SYSTEM):
            break
        system.append(_text(message.get("content")))
    users = (m for m in messages if isinstance(m, dict) and m.get("role") == "user")
    first = next(users, {}).get("content")
    digest = hashlib.blake2b(_lines(system), digest_size=12)
    digest.update(b"\0" + _lines([_text(first)]))
    return TASK_PREFIX + digest.hexdigest()


def rank_of_answer(id: Any) -> int | None:
    """Return the rank that issued an answer's id, of any API; None for any other id."""
    found = _ANSWER.fullmatch(id) if isinstance(id, str) else None
    return int(found[1], 16) if found is not None else None


def rank_tag(rank: int) -> str:
    """Return the first digits of the ids that this rank issues."""
    return f"{rank:0{RANK_DIGITS}x}"


def _text(content: Any) -> str:
    """Return the text of a content; parts that are no text count as JSON."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "\n".join(_part(part) for part in parts)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    try:
        return orjson.dumps(part, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:
        return ""


def _lines(texts: Sequence[str]) -> bytes:
    """Return the texts without blank lines, without spaces at the ends of lines, and without the
    line that Anthropic's agents change at each request.

    The rest after the head is unchanged and begins at the beginning of a line. The head's size is
    that of its kept lines, so that it ends at the same line whatever was removed before.
    """
    text = "\n".join(texts)
    kept: list[str] = []
    at = size = 0
    # Blank lines are dropped, but reading them takes time.
    while at < len(text) and size < HEAD and at < 2 * HEAD:
        end = text.find("\n", at)
        end = end if end >= 0 else len(text)
        line = text[at:end].strip()
        at = end + 1
        if line and not line.startswith(_BILLING):
            kept.append(line)
            size += len(line) + 1
    if rest := text[at:].strip():
        kept.append(rest)
    return "\n".join(kept).encode("utf-8", "surrogatepass")
