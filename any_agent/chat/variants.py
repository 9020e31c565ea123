"""A chat format under other settings of its template, kept for the next call that asks for it."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from any_agent.chat.settings import Settings
from any_agent.chat.writers import Writer
from any_agent.types import Message, Tool

T = TypeVar("T")
_MOST = 32
_TOOL: Tool = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "why",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    ],
}
_TALK: list[Message] = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "ask"},
    {"role": "assistant", "content": "say", "reasoning_content": "why"},
    {"role": "user", "content": "ask"},
    _CALLED,
    {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "3"},
    {"role": "assistant", "content": "say"},
]
_TALKS = (_TALK, _TALK[1:], _TALK[:2], _TALK[1:2], _TALK[1:3])


class Variants(Generic[T]):
    """Bounded: the least recently asked for goes first."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[Any, ...], T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, settings: Settings, make: Callable[[], T]) -> T:
        # True and 1 are equal and not the same to a template.
        key = tuple((name, type(value).__name__, value) for name, value in settings)
        with self._lock:
            made = self._made.get(key)
            if made is None:
                made = self._made[key] = make()
                if len(self._made) > _MOST:
                    self._made.popitem(last=False)
            self._made.move_to_end(key)
            return made


def render_key(own: Writer, other: Writer, settings: Settings) -> bytes:
    """What tells these settings' conversations apart; b"" if only the generation prompt differs.

    16 bytes. Equal where several made-up conversations are written the same under both.
    """
    if all(
        _written(own, talk, tools) == _written(other, talk, tools)
        for talk in _TALKS
        for tools in (None, [_TOOL])
    ):
        return b""
    return hashlib.blake2b(repr(settings).encode(), digest_size=16).digest()


def _written(writer: Writer, talk: list[Message], tools: list[Tool] | None) -> list[int] | str:
    try:
        return writer.prompt_ids(talk, tools, generation=False)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
