"""Stop strings: text that may begin one waits, and nothing after one passes."""

from __future__ import annotations

from collections import deque

from any_agent.chat.output.markers import TEXT, Piece


class StopFilter:
    """Passes pieces until a stop string is complete, then nothing more.

    Markers match by their text, so a stop string may be one, as in the engine's own match.
    Feed it one token at a time: like the engine, it stops at the token that completes a stop.
    If that token completes several, the text ends before the one that begins first.
    The cost per character does not depend on earlier text (Knuth, Morris and Pratt's search).
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._searches = [_Search(s) for s in dict.fromkeys(stops) if s]
        self._pending: deque[Piece] = deque()
        self._pending_length = 0
        self.matched = False

    @property
    def active(self) -> bool:
        return bool(self._searches)

    def push(self, pieces: list[Piece]) -> list[Piece]:
        """Filter the pieces of one token (of any number of tokens, without stop strings)."""
        if self.matched:
            return []
        if not self._searches:
            return pieces
        start: int | None = None
        for text, kind in pieces:
            for search in self._searches:
                end = search.push(text)
                if end is not None:
                    at = self._pending_length + end - search.length
                    start = at if start is None else min(start, at)
            self._append(text, kind)
        if start is not None:
            self.matched = True
            return self._take(start, cut=True)
        doubtful = max(search.state for search in self._searches)
        return self._take(self._pending_length - doubtful, cut=False)

    def finish(self) -> list[Piece]:
        """Return the pieces that began no stop string."""
        return self._take(self._pending_length, cut=False)

    def _append(self, text: str, kind: str) -> None:
        self._pending.append((text, kind))
        self._pending_length += len(text)

    def _take(self, length: int, *, cut: bool) -> list[Piece]:
        """Return the first ``length`` characters; a marker passes whole, or as text if cut."""
        out: list[Piece] = []
        while self._pending:
            text, kind = self._pending[0]
            if len(text) <= length:
                out.append(self._pending.popleft())
                length -= len(text)
                self._pending_length -= len(text)
                continue
            if length and (cut or kind == TEXT):
                out.append((text[:length], TEXT))
                self._pending[0] = (text[length:], TEXT)
                self._pending_length -= length
            break
        if cut:
            self._pending.clear()
            self._pending_length = 0
        return out


class _Search:
    """One stop string's search over a stream of texts."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.length = len(stop)
        self.state = 0
        """How many last characters match the beginning of the stop string."""
        self._fallback = _fallbacks(stop)

    def push(self, text: str) -> int | None:
        """Return where in ``text`` the stop string first ends, if it does."""
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
    """Return for each matched length the next shorter one that matches, too."""
    out = [0, 0]
    for char in stop[1:]:
        k = out[-1]
        while k and stop[k] != char:
            k = out[k]
        out.append(k + 1 if stop[k] == char else 0)
    return out
