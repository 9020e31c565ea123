"""Stop strings: what may begin one is held back, and nothing after one gets through."""

from __future__ import annotations

from collections import deque

from any_agent.chat.output.markers import TEXT, Piece


class StopFilter:
    """Passes pieces on until a stop string is complete, then nothing more.

    Markers count by their text, so a stop string may be one, as in the engine's own match.
    Feed it one token at a time: like the engine, it stops at the token that completes a stop.
    If that token completes several, the text ends before the one that begins first.
    The cost per character does not depend on what was before (Knuth, Morris and Pratt's search).
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._searches = [_Search(s) for s in dict.fromkeys(stops) if s]
        self._held: deque[Piece] = deque()
        self._held_length = 0
        self.matched = False

    @property
    def active(self) -> bool:
        return bool(self._searches)

    def push(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces of one token (of any number of them, where there are no stop strings)."""
        if self.matched:
            return []
        if not self._searches:
            return pieces
        start: int | None = None
        for text, kind in pieces:
            for search in self._searches:
                end = search.push(text)
                if end is not None:
                    at = self._held_length + end - search.length
                    start = at if start is None else min(start, at)
            self._hold(text, kind)
        if start is not None:
            self.matched = True
            return self._take(start, cut=True)
        doubtful = max(search.state for search in self._searches)
        return self._take(self._held_length - doubtful, cut=False)

    def finish(self) -> list[Piece]:
        """What was held back in vain."""
        return self._take(self._held_length, cut=False)

    def _hold(self, text: str, kind: str) -> None:
        self._held.append((text, kind))
        self._held_length += len(text)

    def _take(self, length: int, *, cut: bool) -> list[Piece]:
        """The first ``length`` characters; a marker leaves whole, or as text where it is cut."""
        out: list[Piece] = []
        while self._held:
            text, kind = self._held[0]
            if len(text) <= length:
                out.append(self._held.popleft())
                length -= len(text)
                self._held_length -= len(text)
                continue
            if length and (cut or kind == TEXT):
                out.append((text[:length], TEXT))
                self._held[0] = (text[length:], TEXT)
                self._held_length -= length
            break
        if cut:
            self._held.clear()
            self._held_length = 0
        return out


class _Search:
    """One stop string's search over a stream of texts."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = len(stop)
        self.state = 0
        """How many last characters are the stop string's first ones."""
        self._fallback = _fallbacks(stop)

    def push(self, text: str) -> int | None:
        """Where in ``text`` the stop string ends first, if it does."""
        stop, fallback, state = self._stop, self._fallback, self.state
        at = 0
        while at < len(text):
            if state == 0:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            while state and stop[state] != text[at]:
                state = fallback[state]
            if stop[state] == text[at]:
                state += 1
            at += 1
            if state == self.length:
                self.state = 0
                return at
        self.state = state
        return None


def _fallbacks(stop: str) -> list[int]:
    """For each matched length, the next shorter one that is a match, too."""
    out = [0, 0]
    for char in stop[1:]:
        k = out[-1]
        while k and stop[k] != char:
            k = out[k]
        out.append(k + 1 if stop[k] == char else 0)
    return out
