"""`/v1/responses`: its answers, whole and streaming."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from any_agent.chat import ChatFormat
from any_agent.chat.output.markers import TokenSpans
from any_agent.completions.call_types import Delta, Head
from any_agent.completions.encoders.output_order import Kind, OutputPart
from any_agent.completions.logprobs import LogprobsEncoder, TopLogprobs, top_logprobs_of
from any_agent.completions.responses.output_items import (
    EventFactory,
    ItemStream,
    part_bytes,
    part_id,
    with_status,
)
from any_agent.completions.responses.parse import DEFAULTS, ResponsesCall
from any_agent.completions.responses.tools import own_call
from any_agent.errors import AnyAgentError
from any_agent.types import Interaction

_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""OpenAI's codes of a failed response; all others are its server_error."""
_ABORTED = "the answer was cut off: its session is pinned to weights that the engine replaced"


class ResponsesEncoder:
    """Encodes one call's answer. Its parts come one after another, each as an item."""

    def __init__(
        self, call: ResponsesCall, head: Head, logprobs: LogprobsEncoder, chat: ChatFormat
    ) -> None:
        self._call = call
        self._head = head
        self._logprobs = logprobs
        self._spans = chat.spans
        self._events = EventFactory()
        self._open: ItemStream | None = None
        self._items: list[bytes] = []
        """The items of a stream that are done."""
        self._text_done = False
        """True once the first text is done: only that one has log-probabilities."""
        self._sampled = _SampledOutput() if call.chat.logprobs else None
        self._base = orjson.dumps(_base(call, head))[:-1]

    def whole(self, answers: list[Interaction]) -> bytes:
        return self._response(answers[0], self._recorded_items(answers[0]))

    def start(self, index: int) -> bytes:
        """Return the events that begin the response."""
        response = b'"response":' + self._unfinished(b"in_progress", b"null", b"")
        return self._events.event(b"response.created", response) + self._events.event(
            b"response.in_progress", response
        )

    def delta(self, item: Delta) -> bytes:
        """Return the events of newly certain text; nothing for a delta without content."""
        message = item.message
        if self._sampled is not None:
            self._sampled.add(item)
        text, reasoning, calls = message.content, message.reasoning_content, message.tool_calls
        if text and not (reasoning or calls):
            # Nearly every event is one of these.
            return self._more("content", text)
        events = self._more("reasoning", reasoning) if reasoning else b""
        if text:
            events += self._more("content", text)
        return events + b"".join([self._call_step(step) for step in calls or ()])

    def end(self, index: int, interaction: Interaction) -> bytes:
        """Return the events that end the last item."""
        events = b""
        if self._open is None and not self._items:
            events = self._begin("content")
        cut = interaction.finish_reason in ("length", "abort")
        return events + self._close(b"incomplete" if cut else b"completed", interaction)

    def last(self, answers: list[Interaction]) -> bytes:
        """Return the event with the whole response."""
        kind = {"length": b"response.incomplete", "abort": b"response.failed"}.get(
            answers[0].finish_reason, b"response.completed"
        )
        return self._events.event(
            kind, b'"response":' + self._response(answers[0], b",".join(self._items))
        )

    def failed(self, error: AnyAgentError) -> bytes:
        """Return the event of a failed response; its output so far stays unfinished."""
        code = _CODES.get(error.status, "server_error")
        fields = orjson.dumps({"code": code, "message": error.message})
        response = self._unfinished(b"failed", fields, b",".join(self._items))
        return self._events.event(b"response.failed", b'"response":' + response)

    def _more(self, kind: Kind, text: str) -> bytes:
        now = self._open
        if now is not None and now.kind == kind and self._sampled is None:
            # A fast path: nearly every event is one of these.
            return now.more(text)
        events = b"" if now is not None and now.kind == kind else self._begin(kind)
        assert self._open is not None
        logprobs = None
        if self._sampled is not None and kind == "content" and not self._text_done:
            logprobs = self._sampled.new_text(self._logprobs, self._spans)
        return events + self._open.more(text, logprobs)

    def _call_step(self, step: dict[str, Any]) -> bytes:
        events = b""
        if "id" in step:
            events = self._begin("call", own_call(step, self._call.names))
        arguments = step["function"]["arguments"]
        assert self._open is not None
        return events + (self._open.more(arguments) if arguments else b"")

    def _begin(self, kind: Kind, call: dict[str, Any] | None = None) -> bytes:
        """Begin the next item, once the one before it is done."""
        events = self._close(b"completed") if self._open is not None else b""
        index = len(self._items)
        id = part_id(self._head.id, OutputPart(kind, call=call), index)
        self._open = ItemStream(self._events, kind, id, index, call)
        return events + self._open.begin()

    def _close(self, status: bytes, ended: Interaction | None = None) -> bytes:
        item = self._open
        if item is None:
            return b""
        self._open = None
        logprobs = b"[]"
        if self._sampled is not None and item.kind == "content" and not self._text_done:
            if ended is not None:
                logprobs = self._recorded_logprobs(ended)
            else:
                logprobs = self._sampled.all_text(self._logprobs, self._spans)
        self._text_done |= item.kind == "content"
        events, done = item.end(status, logprobs, self._call.encrypted)
        self._items.append(done)
        return events

    def _recorded_items(self, interaction: Interaction) -> bytes:
        out = []
        texts = 0
        for k, (part, status) in enumerate(with_status(interaction)):
            texts += part.kind == "content"
            logprobs = b"[]"
            if self._call.chat.logprobs and part.kind == "content" and texts == 1:
                logprobs = self._recorded_logprobs(interaction)
            id = part_id(interaction.id, part, k)
            if part.call is not None:
                part = replace(part, call=own_call(part.call, self._call.names))
            out.append(part_bytes(part, id, status, logprobs, self._call.encrypted))
        return b",".join(out)

    def _recorded_logprobs(self, interaction: Interaction) -> bytes:
        ids = interaction.output_ids.tolist()
        message = interaction.output_message
        start = self._reasoning(interaction, ids)
        start, end = self._spans.text(ids, start, calls=bool(message.get("tool_calls")))
        top = top_logprobs_of(interaction)
        return self._logprobs.entries(
            ids[start:end],
            interaction.output_logprobs[start:end].tolist(),
            None if top is None else top[start:end],
        )

    def _reasoning(self, interaction: Interaction, ids: list[int]) -> int:
        message = interaction.output_message
        reasoned = bool(message.get("reasoning_content"))
        answered = bool(message.get("content") or message.get("tool_calls"))
        return self._spans.reasoning(ids, reasoned=reasoned, answered=answered)

    def _response(self, interaction: Interaction, items: bytes) -> bytes:
        match interaction.finish_reason:
            case "length":
                status, error, why = b"incomplete", b"null", b'{"reason":"max_output_tokens"}'
            case "abort":
                failure = {"code": "server_error", "message": _ABORTED}
                status, error, why = b"failed", orjson.dumps(failure), b"null"
            case _:
                status, error, why = b"completed", b"null", b"null"
        return b'%b,"status":"%b","error":%b,"incomplete_details":%b,"output":[%b],"usage":%b}' % (
            self._base,
            status,
            error,
            why,
            items,
            self._usage(interaction),
        )

    def _unfinished(self, status: bytes, error: bytes, items: bytes) -> bytes:
        return (
            b'%b,"status":"%b","error":%b,"incomplete_details":null,"output":[%b],"usage":null}'
            % (self._base, status, error, items)
        )

    def _usage(self, interaction: Interaction) -> bytes:
        prompt, output = self._head.prompt_tokens, len(interaction.output_ids)
        reasoning = 0
        if interaction.output_message.get("reasoning_content"):
            reasoning = self._reasoning(interaction, interaction.output_ids.tolist())
        return (
            b'{"input_tokens":%d,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},'
            b'"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":%d},"total_tokens":%d}'
            % (prompt, output, reasoning, prompt + output)
        )


class _SampledOutput:
    """The tokens of a stream whose log-probabilities are reported."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: TopLogprobs = []
        self._reasoned = self._called = False
        self._reported: int | None = None

    def add(self, item: Delta) -> None:
        self._ids += item.output_ids
        self._logprobs += item.logprobs
        self._top += item.top_logprobs or ()
        self._reasoned |= bool(item.message.reasoning_content)
        self._called |= item.calls or bool(item.message.tool_calls)

    def new_text(self, write: LogprobsEncoder, spans: TokenSpans) -> bytes:
        """Return the log-probabilities of the text's tokens since the last call."""
        start, end = self._span(spans)
        start = start if self._reported is None else self._reported
        self._reported = max(start, end)
        return self._entries(write, start, end)

    def all_text(self, write: LogprobsEncoder, spans: TokenSpans) -> bytes:
        return self._entries(write, *self._span(spans))

    def _span(self, spans: TokenSpans) -> tuple[int, int]:
        start = spans.reasoning(self._ids, reasoned=self._reasoned, answered=True)
        return spans.text(self._ids, start, calls=self._called)

    def _entries(self, write: LogprobsEncoder, start: int, end: int) -> bytes:
        top = self._top[start:end] if self._top else None
        return write.entries(self._ids[start:end], self._logprobs[start:end], top)


def _base(call: ResponsesCall, head: Head) -> dict[str, Any]:
    """Return the fields that are the same in all of a response's events."""
    out = {
        "id": head.id,
        "object": "response",
        "created_at": int(head.created_at),
        "background": False,
        "model": call.chat.model,
        "service_tier": "default",
        "temperature": head.gconfig.temperature,
        "top_p": head.gconfig.top_p,
        "truncation": "disabled",
        **DEFAULTS,
        **call.repeated,
    }
    # OpenAI's metadata values are texts.
    out["metadata"] = {
        name: value if isinstance(value, str) else orjson.dumps(value).decode()
        for name, value in out["metadata"].items()
    }
    return out
