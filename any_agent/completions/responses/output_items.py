"""The output items of an answer of the Responses API, whole and streamed.

Reasoning may be repeated as an opaque text, for agents that keep no reasoning but send
`encrypted_content` back. It hides nothing: the answer contains the reasoning, too.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import orjson

from any_agent.completions.encoders.output_order import Kind, OutputPart, parts_of
from any_agent.custom_calls import CUSTOM, input_of, is_custom
from any_agent.types import Interaction

_OURS = "aa1."
_IN_PROGRESS = b"in_progress"


def encoded(reasoning: str) -> str:
    """Return the reasoning as an opaque text."""
    return _OURS + urlsafe_b64encode(reasoning.encode()).decode()


def decoded(text: str) -> str | None:
    """Return the reasoning of an opaque text; None if :func:`encoded` did not make the text."""
    if not text.startswith(_OURS):
        return None
    try:
        return urlsafe_b64decode(text.removeprefix(_OURS)).decode()
    except (binascii.Error, ValueError):
        return None


PREFIXES = {
    "reasoning": "rs",
    "content": "msg",
    "call": "fc",
    "output": "fco",
    "custom": "ctc",
    "custom_output": "ctco",
}


def part_id(answer_id: str, part: OutputPart, index: int) -> str:
    """Return the :func:`item_id` of a part's item."""
    return item_id(answer_id, CUSTOM if is_custom(part.call) else part.kind, index)


def item_id(answer_id: str, kind: str, index: int) -> str:
    """Return ``msg_<the answer's hex>_<place>``: an item that comes back names its answer."""
    return f"{PREFIXES[kind]}_{answer_id.rpartition('_')[2]}_{index}"


def items_of(interaction: Interaction) -> list[dict[str, Any]]:
    """Return an answer's items as plain data without log-probabilities."""
    return [
        item_of(part, part_id(interaction.id, part, k), status)
        for k, (part, status) in enumerate(with_status(interaction))
    ]


def with_status(interaction: Interaction) -> list[tuple[OutputPart, bytes]]:
    """Return an answer's parts, at least one, each with its status.

    An empty answer is an empty text to send back.
    """
    parts = parts_of(interaction) or [OutputPart("content")]
    statuses = [b"completed"] * len(parts)
    if interaction.finish_reason in ("length", "abort"):
        statuses[-1] = b"incomplete"
    return list(zip(parts, statuses, strict=True))


def item_of(part: OutputPart, id: str, status: bytes = b"completed") -> dict[str, Any]:
    item: dict[str, Any] = orjson.loads(part_bytes(part, id, status))
    return item


_DELTAS = {
    "content": b"response.output_text.delta",
    "reasoning": b"response.reasoning_text.delta",
    "call": b"response.function_call_arguments.delta",
}


class EventFactory:
    """Numbers and encodes the server-sent events of one Responses stream."""

    def __init__(self) -> None:
        self._number = -1

    def event(self, kind: bytes, fields: bytes) -> bytes:
        """Return an event; ``fields``: the JSON between type and number, without braces."""
        self._number += 1
        head = b'event: %b\ndata: {"type":"%b",%b' % (kind, kind, fields)
        return b'%b,"sequence_number":%d}\n\n' % (head, self._number)

    def delta(self, before: bytes, text: str) -> bytes:
        """Return the event of a text's next step; ``before``: the constant part of the event."""
        self._number += 1
        return b'%b%b,"sequence_number":%d}\n\n' % (before, orjson.dumps(text), self._number)


def _delta_head(kind: bytes, where: bytes, more: bytes = b"") -> bytes:
    """Return a delta event up to its text."""
    return b'event: %b\ndata: {"type":"%b",%b%b,"delta":' % (kind, kind, where, more)


class ItemStream:
    """Encodes one item, of the kind reasoning, content or call."""

    def __init__(
        self, events: EventFactory, kind: Kind, id: str, index: int, call: dict[str, Any] | None
    ) -> None:
        self.kind = kind
        self._events = events
        self._id = id
        self._index = index
        self._call = call
        self._texts: list[str] = []
        self._where = b'"item_id":"%b","output_index":%d' % (id.encode(), index)
        if kind != "call":
            self._where += b',"content_index":0'
        more = b',"logprobs":[]' if kind == "content" else b""
        self._delta = _delta_head(_DELTAS[kind], self._where, more)

    def begin(self) -> bytes:
        """Return the events that add the item and, for a text, its one part."""
        event = self._events.event
        part = OutputPart(self.kind, "", self._call)
        item = part_bytes(part, self._id, _IN_PROGRESS)
        item = b'"output_index":%d,"item":%b' % (self._index, item)
        added = event(b"response.output_item.added", item)
        if self.kind == "call":
            return added
        empty = _text_part("", b"[]") if self.kind == "content" else _reasoning_part("")
        return added + event(b"response.content_part.added", b'%b,"part":%b' % (self._where, empty))

    def more(self, text: str, logprobs: bytes | None = None) -> bytes:
        self._texts.append(text)
        if is_custom(self._call):
            # What the input is shows only the whole of the arguments.
            return b""
        before = self._delta
        if logprobs is not None:
            before = _delta_head(_DELTAS[self.kind], self._where, b',"logprobs":' + logprobs)
        return self._events.delta(before, text)

    def end(self, status: bytes, logprobs: bytes, encrypts: bool) -> tuple[bytes, bytes]:
        """Return the events that end the item, and the item."""
        event, where = self._events.event, self._where
        text = "".join(self._texts)
        encoded_text = orjson.dumps(text)
        item = part_bytes(
            OutputPart(self.kind, text, self._call), self._id, status, logprobs, encrypts
        )
        if is_custom(self._call):
            step, given = b"response.custom_tool_call_input.", orjson.dumps(input_of(text))
            done = event(step + b"delta", b'%b,"delta":%b' % (where, given))
            done += event(step + b"done", b'%b,"input":%b' % (where, given))
        elif self.kind == "call":
            assert self._call is not None
            name = orjson.dumps(self._call["function"]["name"])
            done = event(
                b"response.function_call_arguments.done",
                b'%b,"name":%b,"arguments":%b' % (where, name, encoded_text),
            )
        else:
            kind, more, part = b"response.reasoning_text.done", b"", _reasoning_part(text)
            if self.kind == "content":
                kind, more = b"response.output_text.done", b',"logprobs":' + logprobs
                part = _text_part(text, logprobs)
            done = event(kind, b'%b%b,"text":%b' % (where, more, encoded_text))
            done += event(b"response.content_part.done", b'%b,"part":%b' % (where, part))
        fields = b'"output_index":%d,"item":%b' % (self._index, item)
        return done + event(b"response.output_item.done", fields), item


def part_bytes(
    part: OutputPart, id: str, status: bytes, logprobs: bytes = b"[]", encrypts: bool = False
) -> bytes:
    """Return the JSON of a part's item; one in progress has no content yet."""
    kind, text, call = part.kind, part.text, part.call
    begun = status != _IN_PROGRESS
    if kind == "content":
        content = _text_part(text, logprobs) if begun else b""
        return b'{"id":"%b","type":"message","status":"%b","role":"assistant","content":[%b]}' % (
            id.encode(),
            status,
            content,
        )
    if kind == "reasoning":
        content = _reasoning_part(text) if begun else b""
        hidden = b',"encrypted_content":"%b"' % encoded(text).encode() if encrypts and text else b""
        return b'{"id":"%b","type":"reasoning","summary":[],"content":[%b]%b,"status":"%b"}' % (
            id.encode(),
            content,
            hidden,
            status,
        )
    assert call is not None
    fields = {"call_id": call["id"], "name": call["function"]["name"]}
    if "namespace" in call:
        fields["namespace"] = call["namespace"]
    type, field = b"function_call", b"arguments"
    if is_custom(call):
        type, field, text = b"custom_tool_call", b"input", input_of(text)
    return b'{"id":"%b","type":"%b","status":"%b",%b,"%b":%b}' % (
        id.encode(),
        type,
        status,
        orjson.dumps(fields)[1:-1],
        field,
        orjson.dumps(text),
    )


def _text_part(text: str, logprobs: bytes) -> bytes:
    return b'{"type":"output_text","text":%b,"annotations":[],"logprobs":%b}' % (
        orjson.dumps(text),
        logprobs,
    )


def _reasoning_part(text: str) -> bytes:
    return b'{"type":"reasoning_text","text":%b}' % orjson.dumps(text)
