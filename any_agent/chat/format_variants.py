"""A chat format under other settings of its template, kept for the next call that asks for it."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from any_agent.chat import format_probes as probes
from any_agent.chat.prompt_renderer import PromptRenderer
from any_agent.chat.template_kwargs import Settings
from any_agent.types import Message, Tool

T = TypeVar("T")
_MOST = 32
_TALK: list[Message] = [
    probes.SYSTEM,
    probes.USER,
    probes.REASONED,
    probes.NEXT,
    {**probes.REASONED, **probes.CALLED},
    probes.result(1, "3"),
    probes.TEXT,
]
_TALKS = (_TALK, _TALK[1:], _TALK[:2], _TALK[1:2], _TALK[1:3])


class FormatVariants(Generic[T]):
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


def render_key(own: PromptRenderer, other: PromptRenderer, settings: Settings) -> bytes:
    """What tells these settings' conversations apart; b"" if only the generation prompt differs.

    16 bytes. Equal where several made-up conversations are written the same under both.
    """
    if all(
        _written(own, talk, tools) == _written(other, talk, tools)
        for talk in _TALKS
        for tools in (None, probes.TOOLS)
    ):
        return b""
    return hashlib.blake2b(repr(settings).encode(), digest_size=16).digest()


def _written(
    writer: PromptRenderer, talk: list[Message], tools: list[Tool] | None
) -> list[int] | str:
    try:
        return writer.prompt_ids(talk, tools, generation=False)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
