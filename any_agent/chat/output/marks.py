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


class MarkFinder:
    """Where one of some marks is in a text, and how much of its end may begin one."""

    def __init__(self, marks: Collection[str]) -> None:
        self._marks = tuple(marks)
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)))
        firsts = "".join(sorted({m[0] for m in self._marks}))
        self._first = re.compile(f"[{re.escape(firsts)}]")
        self._longest = max(map(len, self._marks))

    def find(self, text: str) -> tuple[int, str] | None:
        """Place and text of the first mark."""
        match = self._whole.search(text)
        return (match.start(), match[0]) if match else None

    def doubtful(self, text: str) -> int:
        """How many last characters may begin a mark; fewer than the longest mark has."""
        for match in self._first.finditer(text, max(0, len(text) - self._longest + 1)):
            tail = text[match.start() :]
            if any(m.startswith(tail) for m in self._marks):
                return len(tail)
        return 0


class TextMarks:
    """Finds markers that are spelled in text, holding back what may begin one."""

    def __init__(self, marks: Mapping[str, str]) -> None:
        """``marks``: their texts and kinds."""
        self._marks = marks
        self._finders: dict[frozenset[str], MarkFinder | None] = {}
        self._text = ""

    def add(self, text: str) -> None:
        self._text += text

    def next(self, wanted: frozenset[str]) -> Piece | None:
        """The next certain piece; markers of kinds that are not ``wanted`` now are text."""
        if not self._text:
            return None
        finder = self._finder(wanted)
        if finder is None:
            return self.flush(), TEXT
        found = finder.find(self._text)
        if found is None:
            at = len(self._text) - finder.doubtful(self._text)
        elif found[0] == 0:
            self._text = self._text[len(found[1]) :]
            return found[1], self._marks[found[1]]
        else:
            at = found[0]
        out, self._text = self._text[:at], self._text[at:]
        return (out, TEXT) if out else None

    def flush(self) -> str:
        out, self._text = self._text, ""
        return out

    def _finder(self, wanted: frozenset[str]) -> MarkFinder | None:
        if wanted not in self._finders:
            texts = [text for text, kind in self._marks.items() if kind in wanted]
            self._finders[wanted] = MarkFinder(texts) if texts else None
        return self._finders[wanted]
