"""Markers: tokens that delimit an output's regions, and how to find them where they are text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TypeAlias

Piece: TypeAlias = tuple[str, str]
"""Some raw output: its text and its kind (:data:`TEXT`, or which marker it is)."""

TEXT = "text"
THINK_OPEN = "think_open"
THINK_CLOSE = "think_close"
CALLS_OPEN = "calls_open"
"""Around all calls of an output, in the families that have it."""
CALLS_CLOSE = "calls_close"
TOOL_OPEN = "tool_open"
"""Around one call, or around what holds calls and nothing else."""
TOOL_CLOSE = "tool_close"
KEY_OPEN = "key_open"
KEY_CLOSE = "key_close"
VALUE_OPEN = "value_open"
VALUE_CLOSE = "value_close"
SEPARATOR = "separator"
"""Between a call's name and what stands beside it."""
ALL_KINDS = frozenset(
    {
        THINK_OPEN,
        THINK_CLOSE,
        CALLS_OPEN,
        CALLS_CLOSE,
        TOOL_OPEN,
        TOOL_CLOSE,
        KEY_OPEN,
        KEY_CLOSE,
        VALUE_OPEN,
        VALUE_CLOSE,
        SEPARATOR,
    }
)


class MarkerFinder:
    """Where one of some marks is in a text, and how much of its end may begin one."""

    def __init__(self, marks: Collection[str]) -> None:
        self._marks = tuple(marks)
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)))
        firsts = "".join(sorted({m[0] for m in self._marks}))
        self._first = re.compile(f"[{re.escape(firsts)}]")
        self._longest = max(map(len, self._marks))

    def find(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Place and text of the first mark from ``start`` on."""
        match = self._whole.search(text, start)
        return (match.start(), match[0]) if match else None

    def doubtful(self, text: str, start: int = 0) -> int:
        """How many last characters, from ``start`` on, may begin a mark; fewer than it has."""
        for match in self._first.finditer(text, max(start, len(text) - self._longest + 1)):
            tail = text[match.start() :]
            if any(m.startswith(tail) for m in self._marks):
                return len(tail)
        return 0


class TextMarkers:
    """Finds markers that are spelled in text, holding back what may begin one."""

    def __init__(self, marks: Mapping[str, str]) -> None:
        """``marks``: their texts and kinds."""
        self._marks = marks
        self._finders: dict[frozenset[str], MarkerFinder | None] = {}
        self._text = ""
        self._at = 0
        """Up to where the text has been passed on."""

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def next(self, wanted: frozenset[str]) -> Piece | None:
        """The next certain piece; markers of kinds that are not ``wanted`` now are text."""
        text, start = self._text, self._at
        if start == len(text):
            return None
        finder = self._finder(wanted)
        if finder is None:
            return self.flush(), TEXT
        found = finder.find(text, start)
        if found is None:
            self._at = len(text) - finder.doubtful(text, start)
        elif found[0] == start:
            self._at = start + len(found[1])
            return found[1], self._marks[found[1]]
        else:
            self._at = found[0]
        return (text[start : self._at], TEXT) if self._at > start else None

    def flush(self) -> str:
        out = self._text[self._at :]
        self._text, self._at = "", 0
        return out

    def _finder(self, wanted: frozenset[str]) -> MarkerFinder | None:
        if wanted not in self._finders:
            texts = [text for text, kind in self._marks.items() if kind in wanted]
            self._finders[wanted] = MarkerFinder(texts) if texts else None
        return self._finders[wanted]
