"""Markers: tokens that delimit an output's regions, and their search in tokens and in text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Piece: TypeAlias = tuple[str, str]
"""Some raw output: its text and its kind (:data:`TEXT`, or a marker's kind)."""

TEXT = "text"
THINK_OPEN = "think_open"
THINK_CLOSE = "think_close"
CALLS_OPEN = "calls_open"
"""Opens the section of all calls of an output, in the families that have one."""
CALLS_CLOSE = "calls_close"
TOOL_OPEN = "tool_open"  # opens one call, or a block that holds calls and nothing else
TOOL_CLOSE = "tool_close"
KEY_OPEN = "key_open"
KEY_CLOSE = "key_close"
VALUE_OPEN = "value_open"
VALUE_CLOSE = "value_close"
SEPARATOR = "separator"  # separates a call's name from what stands beside it
ALL_KINDS = frozenset(
    (THINK_OPEN, THINK_CLOSE, CALLS_OPEN, CALLS_CLOSE, TOOL_OPEN, TOOL_CLOSE, SEPARATOR)
) | {KEY_OPEN, KEY_CLOSE, VALUE_OPEN, VALUE_CLOSE}


@dataclass(frozen=True, slots=True)
class Markers:
    """The tokens and texts that delimit an output's regions."""

    by_id: Mapping[int, Piece]
    """Marker tokens, with their text and kind."""
    stop_ids: frozenset[int]
    """Tokens that end the output's text; one may be a marker, too."""
    in_text: Mapping[str, str]
    """Markers that are no tokens of this vocabulary, with their kind: they are found in text."""


class MarkerFinder:
    """Finds the first of some marks in a text, and how much of its end may begin one."""

    def __init__(self, marks: Collection[str]) -> None:
        self._marks = tuple(marks)
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)))
        firsts = "".join(sorted({m[0] for m in self._marks}))
        self._first = re.compile(f"[{re.escape(firsts)}]")
        self._longest = max(map(len, self._marks))

    def find(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Return place and text of the first mark from ``start`` on."""
        match = self._whole.search(text, start)
        return (match.start(), match[0]) if match else None

    def doubtful(self, text: str, start: int = 0) -> int:
        """Return how many last characters, from ``start`` on, may begin a mark, if any.

        They are fewer than the mark's.
        """
        for match in self._first.finditer(text, max(start, len(text) - self._longest + 1)):
            tail = text[match.start() :]
            if any(m.startswith(tail) for m in self._marks):
                return len(tail)
        return 0


class TextMarkers:
    """Finds markers that are spelled in text; what may begin one waits for more text."""

    def __init__(self, marks: Mapping[str, str]) -> None:
        """``marks``: their texts and kinds."""
        self._marks = marks
        self._finders: dict[frozenset[str], MarkerFinder | None] = {}
        self._text = ""
        self._at = 0
        """The position up to which the text has been returned."""

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def next(self, wanted: frozenset[str]) -> Piece | None:
        """Return the next certain piece; markers of kinds that are not ``wanted`` now are text."""
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


class TokenSpans:
    """Locates the reasoning tokens and the text tokens of one model's outputs.

    A region that no single token delimits is not located.
    """

    def __init__(self, by_id: Mapping[int, Piece]) -> None:
        """``by_id``: the tokens that are markers, with their kinds."""
        self._closes = {i for i, (_, kind) in by_id.items() if kind == THINK_CLOSE}
        self._opens = {i for i, (_, kind) in by_id.items() if kind in (TOOL_OPEN, CALLS_OPEN)}

    def reasoning(self, ids: Sequence[int], *, reasoned: bool, answered: bool) -> int:
        """Count the reasoning's tokens, the token that ends it included; 0 if unknown.

        ``reasoned``: the message has reasoning; ``answered``: it has anything else.
        """
        if not reasoned:
            return 0
        end = _first(ids, self._closes, 0)
        if end is None and answered:
            # A call may have ended it.
            end = _first(ids, self._opens, 0)
            return 0 if end is None else end
        return len(ids) if end is None else end + 1

    def text(self, ids: Sequence[int], start: int, *, calls: bool) -> tuple[int, int]:
        """Return the span from the reasoning's end, ``start``, to what opens the first call."""
        end = _first(ids, self._opens, start) if calls else None
        return start, len(ids) if end is None else end


def _first(ids: Sequence[int], wanted: set[int], start: int) -> int | None:
    places = []
    for each in wanted:
        try:
            places.append(ids.index(each, start))
        except ValueError:
            continue
    return min(places, default=None)
