"""The stop strings of an output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from any_agent.chat.output.detokenizer import WindowDetokenizer

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids to text; an incomplete multi-byte character at the end shows as U+FFFD."""


class StopMatcher:
    """Finds the token that completes a stop string, however the string is split into tokens."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._keep = max(map(len, self._stops)) - 1
        self._tail = ""
        self._decoder = WindowDetokenizer(decode)

    def push(self, token: int) -> str | None:
        """Add one token; return the stop string that it completes, as :func:`first_stop`."""
        piece = self._decoder.push([token])
        if not piece:
            return None
        text = self._tail + piece
        found = first_stop(text, self._stops)
        self._tail = text[-self._keep :] if self._keep else ""
        return found


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return the stop string whose first occurrence ends first; of those, the longest."""
    best: tuple[int, int] | None = None
    found = None
    for stop in stops:
        at = text.find(stop)
        if at >= 0 and (best is None or (at + len(stop), at) < best):
            best, found = (at + len(stop), at), stop
    return found


def doubtful_end(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may begin a stop string."""
    for n in range(min(len(text), max(map(len, stops), default=0)), 0, -1):
        if any(s.startswith(text[-n:]) for s in stops):
            return n
    return 0
