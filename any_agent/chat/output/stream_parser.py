"""Parsers of one output while it is sampled: text, reasoning and calls, or text alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from any_agent.chat.output.detokenizer import Detokenizer
from any_agent.chat.output.json_stream import as_arguments, encodable
from any_agent.chat.output.markers import TEXT, Markers, Piece, TextMarkers
from any_agent.chat.output.message import MessageBuilder, MessageDelta, ParsedMessage
from any_agent.chat.output.state_machine import StateMachine
from any_agent.chat.output.stop_strings import StopFilter
from any_agent.types import Tool


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
        self.stops = StopFilter(stop)
        self._marks = TextMarkers(markers.in_text) if markers.in_text else None
        self._ended = False
        self._push(self._pieces(forced))
        self._ended = False

    def feed(self, ids: list[int]) -> list[MessageDelta]:
        """Return what became certain by these tokens."""
        if not self.stops.active:
            if not self._ended:
                self._push(self._pieces(ids))
            return self._builder.take_deltas()
        # With stop strings each token counts by itself; else a run of text is decoded at once.
        for i in ids:
            if self._ended or self.stops.matched:
                break
            self._push(self.stops.push(self._pieces((i,))))
        return self._builder.take_deltas()

    def finish(self) -> tuple[list[MessageDelta], ParsedMessage]:
        """Return the remaining deltas, and the complete message."""
        if not self._ended and not self.stops.matched:
            self._push(self.stops.push([(self._detokenizer.flush(), TEXT)]))
        self._push(self.stops.finish())
        if self._marks is not None:
            self._machine.push(self._marks.flush(), TEXT)
        self._machine.finish()
        self._builder.end()
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


log = logging.getLogger(__name__)


class BufferedParser:
    """Collects tokens, and parses them at the end by the family's parser in ``renderers``."""

    def __init__(
        self,
        renderer: Any,
        decode: Callable[[Sequence[int]], str],
        detokenizer: Detokenizer,
        builder: MessageBuilder,
        *,
        prompt_ids: list[int],
        tools: list[Tool] | None,
        stop_ids: frozenset[int],
        stop: tuple[str, ...],
    ) -> None:
        self._renderer = renderer
        self._decode = decode
        self._detokenizer = detokenizer
        self._builder = builder
        self._prompt_ids = prompt_ids
        self._tools = tools
        self._stop_ids = stop_ids
        self.stops = StopFilter(stop)
        self._ids: list[int] = []
        self._uncut = 0
        """How many tokens end at or before the text that no stop string cuts."""
        self._length = 0
        self._visible = 0
        self._tail: list[str] = []

    def feed(self, ids: list[int]) -> list[MessageDelta]:
        for i in ids:
            if self.stops.matched or (self._ids and self._ids[-1] in self._stop_ids):
                break
            self._ids.append(i)
            if self.stops.active:
                self._match_stops(self._detokenizer.push([i]))
        return []

    def finish(self) -> tuple[list[MessageDelta], ParsedMessage]:
        if self.stops.matched:
            # The token that completes a stop string may begin with text before it.
            self._parse(self._ids[: self._uncut], "".join(self._tail))
        else:
            self._parse(self._ids, "")
        self._builder.end()
        return self._builder.take_deltas(), self._builder.message()

    def _match_stops(self, text: str) -> None:
        self._length += len(text)
        passed = "".join(t for t, _ in self.stops.push([(text, TEXT)] if text else []))
        self._visible += len(passed)
        self._tail.append(passed)
        if self._visible == self._length:
            self._uncut = len(self._ids)
            self._tail = []

    def _parse(self, ids: list[int], more: str) -> None:
        """Parse into the builder; what the parser did not read as a call is text.

        ``more``: content after the text of these tokens.
        """
        builder = self._builder
        try:
            response = self._renderer.parse_response(
                ids, prompt_ids=self._prompt_ids, tools=self._tools
            )
        except Exception:
            # A parser that a model's odd output breaks must not lose the output.
            log.warning(
                "renderer %s cannot parse an output; it stays text", self._renderer.config.name
            )
            builder.content(self._decode([i for i in ids if i not in self._stop_ids]) + more)
            return
        builder.reasoning(response.reasoning_content or "")
        builder.content(self._with_white_space(response, ids) if response.content else "")
        calls = []
        for call in response.tool_calls:
            arguments = as_arguments(call.arguments) if call.status == "ok" else None
            if arguments is not None and self._tools and _is_name(call.name):
                calls.append((call.name, arguments))
                continue
            span = call.token_span
            builder.content(self._decode(ids[span[0] : span[1]]) if span else call.raw)
        builder.content(more)
        for name, arguments in calls:
            builder.open_call(name)
            builder.arguments(arguments)
            builder.close_call()

    def _with_white_space(self, response: Any, ids: list[int]) -> str:
        """Return the content with the white space around it that the parser took away.

        Line breaks after reasoning are the template's.
        """
        body = str(response.content).strip()
        text = self._decode([i for i in ids if i not in self._stop_ids])
        at = text.rfind(body)
        if not body or at < 0:
            return str(response.content)
        before, after = text[:at], text[at + len(body) :]
        before = before[len(before.rstrip()) :]
        if response.reasoning_content:
            before = before.lstrip("\r\n")
        return before + body + after[: len(after) - len(after.lstrip())]


StreamParser: TypeAlias = IncrementalParser | BufferedParser
"""The deltas of all ``feed`` calls and of ``finish`` concatenate to the parsed message."""


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and encodable(name)
