"""Parsing one output while it is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from any_agent.chat.output.detokenise import Detokeniser
from any_agent.chat.output.machine import (
    TEXT,
    THINK_CLOSE,
    THINK_OPEN,
    Deltas,
    MessageDelta,
    OutputMachine,
    ParsedMessage,
    Trimmed,
)
from any_agent.chat.output.stops import Piece, StopFilter

_THINK_TEXT = {"<think>": THINK_OPEN, "</think>": THINK_CLOSE}


class StreamParser(Protocol):
    """The deltas of all ``feed`` calls and of ``finish`` concatenate to the parsed message."""

    def feed(self, ids: list[int]) -> list[MessageDelta]:
        """What became certain by these tokens."""

    def finish(self, *, matched_stop: str | None) -> tuple[list[MessageDelta], ParsedMessage]:
        """The rest, and the whole. ``matched_stop``: the stop string that the engine met.

        The parser has met it too, unless the engine reads the text differently; then nothing
        is cut, because what has left cannot be taken back.
        """


@dataclass(frozen=True, slots=True)
class Markers:
    """Which tokens delimit an output's regions."""

    by_id: Mapping[int, Piece]
    """Marker tokens, with their text and kind."""
    stop_ids: frozenset[int]
    """Tokens that end the output's text."""
    think_in_text: bool
    """The reasoning markers are not tokens of this vocabulary: they are found in the text."""


class IncrementalParser:
    """Tokens to deltas through: detokeniser, stop strings, markers, machine."""

    def __init__(
        self,
        detokeniser: Detokeniser,
        markers: Markers,
        machine: OutputMachine,
        stop: tuple[str, ...],
    ) -> None:
        self._detokeniser = detokeniser
        self._markers = markers
        self._machine = machine
        self._has_stops = any(stop)
        self._stops = StopFilter(stop)
        self._marks = TextMarks(_THINK_TEXT) if markers.think_in_text else None
        self._ended = False

    def feed(self, ids: list[int]) -> list[MessageDelta]:
        # With stop strings each token counts by itself; else a run of text is decoded at once.
        for run in ([i] for i in ids) if self._has_stops else (ids,):
            if self._ended or self._stops.matched:
                break
            self._pass_on(self._stops.push(self._pieces(run)))
        return self._machine.deltas.take()

    def finish(self, *, matched_stop: str | None) -> tuple[list[MessageDelta], ParsedMessage]:
        if not self._ended and not self._stops.matched:
            self._pass_on(self._stops.push([(self._detokeniser.flush(), TEXT)]))
        self._pass_on(self._stops.finish())
        if self._marks is not None:
            self._machine.push(self._marks.flush())
        parsed = self._machine.finish()
        return self._machine.deltas.take(), parsed

    def _pieces(self, ids: Sequence[int]) -> list[Piece]:
        by_id, stop_ids = self._markers.by_id, self._markers.stop_ids
        out: list[Piece] = []
        start = 0
        for at, i in enumerate(ids):
            if i not in by_id and i not in stop_ids:
                continue
            text = self._detokeniser.push(ids[start:at]) + self._detokeniser.flush()
            if text:
                out.append((text, TEXT))
            start = at + 1
            if i in stop_ids:
                self._ended = True
                return out
            out.append(by_id[i])
        text = self._detokeniser.push(ids[start:])
        if text:
            out.append((text, TEXT))
        return out

    def _pass_on(self, pieces: list[Piece]) -> None:
        for text, kind in pieces:
            if self._marks is None or kind != TEXT:
                if self._marks is not None:
                    self._machine.push(self._marks.flush())
                self._machine.push(text, kind)
                continue
            self._marks.add(text)
            while piece := self._marks.next(self._machine.may_meet_reasoning):
                self._machine.push(*piece)


class TextMarks:
    """Finds markers that are spelled in text, holding back what may begin one."""

    def __init__(self, marks: Mapping[str, str]) -> None:
        self._marks = marks
        self._text = ""

    def add(self, text: str) -> None:
        self._text += text

    def next(self, wanted: bool) -> Piece | None:
        """The next certain piece; ``wanted`` False: no marker matters any more."""
        if not self._text:
            return None
        if not wanted:
            return self.flush(), TEXT
        found = [(at, m) for m in self._marks if (at := self._text.find(m)) >= 0]
        if found:
            at, mark = min(found)
            if at == 0:
                self._text = self._text[len(mark) :]
                return mark, self._marks[mark]
        else:
            longest = max(map(len, self._marks)) - 1
            doubtful = (
                n
                for n in range(min(longest, len(self._text)), 0, -1)
                if any(m.startswith(self._text[-n:]) for m in self._marks)
            )
            at = len(self._text) - next(doubtful, 0)
        out, self._text = self._text[:at], self._text[at:]
        return (out, TEXT) if out else None

    def flush(self) -> str:
        out, self._text = self._text, ""
        return out


class BufferedParser:
    """For families that are parsed whole: reasoning and calls leave at the end.

    ``parse_whole`` takes the output's ids and is the same function as the one behind ``parse``.
    """

    def __init__(
        self,
        parse_whole: Callable[[list[int]], ParsedMessage],
        detokeniser: Detokeniser,
        stop_ids: frozenset[int],
        stop: tuple[str, ...],
    ) -> None:
        self._parse_whole = parse_whole
        self._detokeniser = detokeniser
        self._stop_ids = stop_ids
        self._stops = StopFilter(stop)
        self._ids: list[int] = []
        self._clean: tuple[int, int] = (0, 0)
        self._raw = 0
        self._visible = 0
        self._tail: list[str] = []

    def feed(self, ids: list[int]) -> list[MessageDelta]:
        for i in ids:
            if self._stops.matched or (self._ids and self._ids[-1] in self._stop_ids):
                break
            self._ids.append(i)
            self._see(self._detokeniser.push([i]))
        return []

    def _see(self, text: str) -> None:
        """Follow how many tokens end at or before the text that no stop string cuts."""
        self._raw += len(text)
        passed = "".join(t for t, _ in self._stops.push([(text, TEXT)] if text else []))
        self._visible += len(passed)
        self._tail.append(passed)
        if self._visible == self._raw:
            self._clean = (len(self._ids), self._visible)
            self._tail = []

    def finish(self, *, matched_stop: str | None) -> tuple[list[MessageDelta], ParsedMessage]:
        if not self._stops.matched:
            self._tail += [text for text, _ in self._stops.finish()]
        if self._stops.matched:
            # The token that completes a stop string may begin with text before it.
            parsed = self._parse_whole(self._ids[: self._clean[0]])
            parsed.content = _append(parsed.content, "".join(self._tail))
        else:
            parsed = self._parse_whole(self._ids)
        deltas = Deltas()
        deltas.reasoning(parsed.reasoning_content or "")
        deltas.content(parsed.content)
        for index, call in enumerate(parsed.tool_calls):
            deltas.call(index, call)
        return deltas.take(), parsed


def _append(content: str, more: str) -> str:
    trimmed = Trimmed()
    trimmed.push(content)
    trimmed.push(more)
    return trimmed.text()
