"""Parsing one output while it is sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from any_agent.chat.output.detokenizer import Detokenizer
from any_agent.chat.output.markers import TEXT, Piece, TextMarkers
from any_agent.chat.output.message import MessageDelta, ParsedMessage
from any_agent.chat.output.message_builder import MessageBuilder
from any_agent.chat.output.state_machine import StateMachine
from any_agent.chat.output.stop_strings import StopFilter


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
    """Tokens that end the output's text; one may be a marker, too."""
    in_text: Mapping[str, str]
    """Markers that are no tokens of this vocabulary, with their kind: they are found in text."""


class IncrementalParser:
    """Tokens to deltas through: detokeniser, stop strings, markers, machine, builder."""

    def __init__(
        self,
        detokeniser: Detokenizer,
        markers: Markers,
        machine: StateMachine,
        builder: MessageBuilder,
        stop: tuple[str, ...],
        forced: Sequence[int] = (),
    ) -> None:
        """``forced``: tokens of the prompt's end that are read as output; no stop string ends
        in them."""
        self._detokeniser = detokeniser
        self._by_id = markers.by_id
        self._stop_ids = markers.stop_ids
        self._special = markers.stop_ids | markers.by_id.keys()
        self._machine = machine
        self._builder = builder
        self._stops = StopFilter(stop)
        self._marks = TextMarkers(markers.in_text) if markers.in_text else None
        self._ended = False
        self._pass_on(self._pieces(forced))
        self._ended = False

    def feed(self, ids: list[int]) -> list[MessageDelta]:
        if not self._stops.active:
            if not self._ended:
                self._pass_on(self._pieces(ids))
            return self._builder.take()
        # With stop strings each token counts by itself; else a run of text is decoded at once.
        for i in ids:
            if self._ended or self._stops.matched:
                break
            self._pass_on(self._stops.push(self._pieces((i,))))
        return self._builder.take()

    def finish(self, *, matched_stop: str | None) -> tuple[list[MessageDelta], ParsedMessage]:
        if not self._ended and not self._stops.matched:
            self._pass_on(self._stops.push([(self._detokeniser.flush(), TEXT)]))
        self._pass_on(self._stops.finish())
        if self._marks is not None:
            self._machine.push(self._marks.flush(), TEXT)
        self._machine.finish()
        return self._builder.take(), self._builder.message()

    def _pieces(self, ids: Sequence[int]) -> list[Piece]:
        if self._special.isdisjoint(ids):
            text = self._detokeniser.push(ids)
            return [(text, TEXT)] if text else []
        by_id, stop_ids = self._by_id, self._stop_ids
        out: list[Piece] = []
        start = 0
        for at, i in enumerate(ids):
            if i not in self._special:
                continue
            text = self._detokeniser.push(ids[start:at]) + self._detokeniser.flush()
            if text:
                out.append((text, TEXT))
            start = at + 1
            if i in by_id:
                out.append(by_id[i])
            if i in stop_ids:
                self._ended = True
                return out
        text = self._detokeniser.push(ids[start:])
        if text:
            out.append((text, TEXT))
        return out

    def _pass_on(self, pieces: list[Piece]) -> None:
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
