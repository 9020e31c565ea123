"""The text of one output, as it was written: no reasoning, no calls, nothing trimmed."""

from __future__ import annotations

from any_agent.chat.output.detokenizer import Detokenizer
from any_agent.chat.output.markers import TEXT
from any_agent.chat.output.message import MessageDelta, ParsedMessage
from any_agent.chat.output.stop_strings import StopFilter


class TextParser:
    """Tokens to text, which ends before the first stop token or stop string."""

    def __init__(
        self, detokeniser: Detokenizer, stop_ids: frozenset[int], stop: tuple[str, ...]
    ) -> None:
        self._detokeniser = detokeniser
        self._stop_ids = stop_ids
        self._has_stops = any(stop)
        self._stops = StopFilter(stop)
        self._text: list[str] = []
        self._ended = False

    def feed(self, ids: list[int]) -> list[MessageDelta]:
        passed = []
        # With stop strings each token counts by itself; else all are decoded at once.
        for run in ([i] for i in ids) if self._has_stops else (ids,):
            if self._ended or self._stops.matched:
                break
            passed.append(self._pass(self._decode(run)))
        return self._deltas("".join(passed))

    def finish(self, *, matched_stop: str | None) -> tuple[list[MessageDelta], ParsedMessage]:
        rest = ""
        if not self._ended and not self._stops.matched:
            rest = self._pass(self._detokeniser.flush())
        rest += "".join(text for text, _ in self._stops.finish())
        deltas = self._deltas(rest)
        return deltas, ParsedMessage("".join(self._text))

    def _decode(self, ids: list[int]) -> str:
        for at, i in enumerate(ids):
            if i in self._stop_ids:
                self._ended = True
                return self._detokeniser.push(ids[:at]) + self._detokeniser.flush()
        return self._detokeniser.push(ids)

    def _pass(self, text: str) -> str:
        if not self._has_stops or not text:
            return text
        return "".join(passed for passed, _ in self._stops.push([(text, TEXT)]))

    def _deltas(self, text: str) -> list[MessageDelta]:
        if not text:
            return []
        self._text.append(text)
        return [MessageDelta(content=text)]
