"""Parsers of one output while it is sampled: text, reasoning and calls, or text alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from any_agent.chat.output.detokenizer import Detokenizer
from any_agent.chat.output.markers import TEXT, Markers, Piece, TextMarkers
from any_agent.chat.output.message import MessageDelta, ParsedMessage
from any_agent.chat.output.message_builder import MessageBuilder
from any_agent.chat.output.state_machine import StateMachine
from any_agent.chat.output.stop_strings import StopFilter


class StreamParser(Protocol):
    """The deltas of all ``feed`` calls and of ``finish`` concatenate to the parsed message."""

    def feed(self, ids: list[int]) -> list[MessageDelta]:
        """Return what became certain by these tokens."""

    def finish(self) -> tuple[list[MessageDelta], ParsedMessage]:
        """Return the remaining deltas, and the complete message."""


class IncrementalParser:
    """Turns tokens into deltas: detokenizer, stop strings, markers, state machine, builder."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        markers: Markers,
        machine: StateMachine,
        builder: MessageBuilder,
        stop: tuple[str, ...],
        forced: Sequence[int] = (),
    ) -> None:
        """``forced``: tokens of the prompt's end that are parsed as output; no stop string ends
        in them."""
        self._detokenizer = detokenizer
        self._by_id = markers.by_id
        self._stop_ids = markers.stop_ids
        self._special = markers.stop_ids | markers.by_id.keys()
        self._machine = machine
        self._builder = builder
        self._stops = StopFilter(stop)
        self._marks = TextMarkers(markers.in_text) if markers.in_text else None
        self._ended = False
        self._push(self._pieces(forced))
        self._ended = False

    def feed(self, ids: list[int]) -> list[MessageDelta]:
        if not self._stops.active:
            if not self._ended:
                self._push(self._pieces(ids))
            return self._builder.take_deltas()
        # With stop strings each token counts by itself; else a run of text is decoded at once.
        for i in ids:
            if self._ended or self._stops.matched:
                break
            self._push(self._stops.push(self._pieces((i,))))
        return self._builder.take_deltas()

    def finish(self) -> tuple[list[MessageDelta], ParsedMessage]:
        if not self._ended and not self._stops.matched:
            self._push(self._stops.push([(self._detokenizer.flush(), TEXT)]))
        self._push(self._stops.finish())
        if self._marks is not None:
            self._machine.push(self._marks.flush(), TEXT)
        self._machine.finish()
        return self._builder.take_deltas(), self._builder.message()

    def _pieces(self, ids: Sequence[int]) -> list[Piece]:
        if self._special.isdisjoint(ids):
            text = self._detokenizer.push(ids)
            return [(text, TEXT)] if text else []
        by_id, stop_ids = self._by_id, self._stop_ids
        out: list[Piece] = []
        start = 0
        for at, i in enumerate(ids):
            if i not in self._special:
                continue
            text = self._detokenizer.push(ids[start:at]) + self._detokenizer.flush()
            if text:
                out.append((text, TEXT))
            start = at + 1
            if i in by_id:
                out.append(by_id[i])
            if i in stop_ids:
                self._ended = True
                return out
        text = self._detokenizer.push(ids[start:])
        if text:
            out.append((text, TEXT))
        return out

    def _push(self, pieces: list[Piece]) -> None:
        machine, marks = self._machine, self._marks
        if marks is None:
            for text, kind in pieces:
                machine.push(text, kind)
            return
        for text, kind in pieces:
            if kind != TEXT:
                machine.push(marks.flush(), TEXT)
                machine.push(text, kind)
                continue
            marks.add(text)
            while piece := marks.next(machine.wanted):
                machine.push(*piece)


class TextParser:
    """Turns tokens into text as written: no reasoning, no calls, nothing trimmed.

    The text ends before the first stop token or stop string.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop_ids: frozenset[int], stop: tuple[str, ...]
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_ids = stop_ids
        self._stops = StopFilter(stop)
        self._text: list[str] = []
        self._ended = False

    def feed(self, ids: list[int]) -> list[MessageDelta]:
        parts = []
        # With stop strings each token counts by itself; else all are decoded at once.
        for run in ([i] for i in ids) if self._stops.active else (ids,):
            if self._ended or self._stops.matched:
                break
            parts.append(self._filter(self._decode(run)))
        return self._deltas("".join(parts))

    def finish(self) -> tuple[list[MessageDelta], ParsedMessage]:
        rest = ""
        if not self._ended and not self._stops.matched:
            rest = self._filter(self._detokenizer.flush())
        rest += "".join(text for text, _ in self._stops.finish())
        return self._deltas(rest), ParsedMessage("".join(self._text))

    def _decode(self, ids: list[int]) -> str:
        for at, i in enumerate(ids):
            if i in self._stop_ids:
                self._ended = True
                return self._detokenizer.push(ids[:at]) + self._detokenizer.flush()
        return self._detokenizer.push(ids)

    def _filter(self, text: str) -> str:
        return "".join(part for part, _ in self._stops.push([(text, TEXT)])) if text else ""

    def _deltas(self, text: str) -> list[MessageDelta]:
        if not text:
            return []
        self._text.append(text)
        return [MessageDelta(content=text)]
