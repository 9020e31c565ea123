"""What a conversation began with, read from a call's body: by it the calls of agents that open no
sessions find their rank and their task.

The router and the ranks read it alike, whichever API a call came by, so nothing here needs the
policy's chat format. What does not change what was said (texts in parts, blank lines, an API's name
for the system prompt) does not change it either.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

TASK_PREFIX = "auto-"
"""Of tasks' names that were made from conversations' heads."""
RANK_DIGITS = 4
"""Of the hexadecimal digits after `resp_`, those that name the rank which gave the id."""
_HEAD = 65_536
"""Characters of a text, without blank lines, after which it is taken as it is: to look at each line
of many megabytes stops everybody else in the process."""
_SYSTEM = ("system", "developer")
_BILLING = "x-anthropic-billing-header:"
_RESPONSE = re.compile(rf"resp_([0-9a-f]{{{RANK_DIGITS}}})[0-9a-f]+")


def task_of(body: Any) -> str:
    """The task that a call's conversation is an attempt at: equal for equal system prompts (or
    instructions) and first user messages. Takes any JSON value."""
    body = body if isinstance(body, Mapping) else {}
    given = body.get("messages")
    messages: Sequence[Any] = given if isinstance(given, list) else ()
    if not messages and "input" in body:
        given = body["input"]
        messages = given if isinstance(given, list) else [{"role": "user", "content": given}]
    system = [_said(body[name]) for name in ("instructions", "system") if body.get(name)]
    for message in messages:
        if not (isinstance(message, dict) and message.get("role") in _SYSTEM):
            break
        system.append(_said(message.get("content")))
    users = (m for m in messages if isinstance(m, dict) and m.get("role") == "user")
    first = next(users, {}).get("content")
    digest = hashlib.blake2b(_lines(system), digest_size=12)
    digest.update(b"\0" + _lines([_said(first)]))
    return TASK_PREFIX + digest.hexdigest()


def rank_of_response(id: Any) -> int | None:
    """The rank that gave a response its id; None for what is no such id."""
    found = _RESPONSE.fullmatch(id) if isinstance(id, str) else None
    return int(found[1], 16) if found is not None else None


def rank_tag(rank: int) -> str:
    """How an id begins that this rank gives."""
    return f"{rank:0{RANK_DIGITS}x}"


def _said(content: Any) -> str:
    """The text of a content; of what is more than text, what stands in it."""
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
    """Without blank lines, and without what stands at the ends of the others; nor the line that
    Anthropic's agents write anew with each request.

    What comes after the head is as it is, from the beginning of a line. The head is measured by
    what is kept of it, so it ends at the same line whatever is left out before.
    """
    text = "\n".join(texts)
    kept: list[str] = []
    at = size = 0
    # Blank lines are kept nowhere, but cost a look.
    while at < len(text) and size < _HEAD and at < 2 * _HEAD:
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
