"""Parsing of outputs in an unknown grammar: the whole output at its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from any_agent.chat.output.detokenizer import Detokenizer
from any_agent.chat.output.json_stream import as_arguments, encodable
from any_agent.chat.output.markers import TEXT
from any_agent.chat.output.message import MessageDelta, ParsedMessage
from any_agent.chat.output.message_builder import MessageBuilder
from any_agent.chat.output.stop_strings import StopFilter
from any_agent.types import Tool

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
        self._stops = StopFilter(stop)
        self._ids: list[int] = []
        self._uncut = 0
        """How many tokens end at or before the text that no stop string cuts."""
        self._length = 0
        self._visible = 0
        self._tail: list[str] = []

    def feed(self, ids: list[int]) -> list[MessageDelta]:
        for i in ids:
            if self._stops.matched or (self._ids and self._ids[-1] in self._stop_ids):
                break
            self._ids.append(i)
            if self._stops.active:
                self._match_stops(self._detokenizer.push([i]))
        return []

    def finish(self) -> tuple[list[MessageDelta], ParsedMessage]:
        if self._stops.matched:
            # The token that completes a stop string may begin with text before it.
            self._parse(self._ids[: self._uncut], "".join(self._tail))
        else:
            self._parse(self._ids, "")
        return self._builder.take_deltas(), self._builder.message()

    def _match_stops(self, text: str) -> None:
        self._length += len(text)
        passed = "".join(t for t, _ in self._stops.push([(text, TEXT)] if text else []))
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
        builder.content(response.content or "")
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


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and encodable(name)
