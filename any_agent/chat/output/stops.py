"""Holding back text that may be the beginning of a stop string."""

from __future__ import annotations

from typing import TypeAlias

Piece: TypeAlias = tuple[str, str]
"""Some raw output: its text and its kind (``text``, or which marker the token is)."""


class StopFilter:
    """Passes pieces on until a stop string is complete, then nothing more.

    Markers count by their text, so a stop string may be one, as in the engine's own match.
    Feed it one token at a time: like the engine, it stops at the token that completes a stop.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held: list[Piece] = []
        self._held_text = ""
        self.matched = False

    def push(self, pieces: list[Piece]) -> list[Piece]:
        if self.matched:
            return []
        if not self._stops:
            return pieces
        for text, kind in pieces:
            self._hold(text, kind)
        starts = [at for s in self._stops if (at := self._held_text.find(s)) >= 0]
        if starts:
            self.matched = True
            return self._take(min(starts), cut=True)
        return self._take(len(self._held_text) - self._doubtful(), cut=False)

    def finish(self) -> list[Piece]:
        """What was held back in vain."""
        return self._take(len(self._held_text), cut=False)

    def _hold(self, text: str, kind: str) -> None:
        self._held_text += text
        # One piece of text, however many tokens a stop string's beginning takes.
        if kind == "text" and self._held and self._held[-1][1] == "text":
            self._held[-1] = (self._held[-1][0] + text, kind)
        else:
            self._held.append((text, kind))

    def _doubtful(self) -> int:
        """How many last characters may begin a stop string."""
        text = self._held_text
        for n in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._stops):
                return n
        return 0

    def _take(self, length: int, *, cut: bool) -> list[Piece]:
        """The first ``length`` characters; a marker leaves whole, or as text where it is cut."""
        out: list[Piece] = []
        while self._held:
            text, kind = self._held[0]
            if len(text) <= length:
                out.append(self._held.pop(0))
                length -= len(text)
                continue
            if length and (cut or kind == "text"):
                out.append((text[:length], "text"))
                self._held[0] = (text[length:], "text")
            break
        if cut:
            self._held = []
        self._held_text = "".join(text for text, _ in self._held)
        return out
