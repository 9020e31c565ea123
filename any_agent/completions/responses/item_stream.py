"""The events of one output item while it is streamed, and the item when it is done."""

from __future__ import annotations

from typing import Any

import orjson

from any_agent.completions.responses.reasoning import encoded

_DELTAS = {
    "content": b"response.output_text.delta",
    "reasoning": b"response.reasoning_text.delta",
    "call": b"response.function_call_arguments.delta",
}


class EventFactory:
    """Numbers and encodes the server-sent events of one Responses stream."""

    def __init__(self) -> None:
        self._number = 0

    def event(self, kind: bytes, fields: bytes) -> bytes:
        """Return an event; ``fields``: the JSON between type and number, without braces."""
        number = self._number
        self._number = number + 1
        return b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%d}\n\n' % (
            kind,
            kind,
            fields,
            number,
        )

    def delta(self, before: bytes, text: str) -> bytes:
        """Return the event of a text's next step; ``before``: the constant part of the event."""
        number = self._number
        self._number = number + 1
        return b'%b%b,"sequence_number":%d}\n\n' % (before, orjson.dumps(text), number)


def _delta_head(kind: bytes, where: bytes, more: bytes = b"") -> bytes:
    """Return a delta event up to its text."""
    return b'event: %b\ndata: {"type":"%b",%b%b,"delta":' % (kind, kind, where, more)


class ItemStream:
    """Encodes one item, of the kind reasoning, content or call."""

    def __init__(
        self, events: EventFactory, kind: str, id: str, index: int, call: dict[str, Any] | None
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
        added = self._events.event(
            b"response.output_item.added",
            b'"output_index":%d,"item":%b' % (self._index, self._item(b"in_progress", None)),
        )
        if self.kind == "call":
            return added
        part = _text_part("", b"[]") if self.kind == "content" else _reasoning_part("")
        return added + self._events.event(
            b"response.content_part.added", b'%b,"part":%b' % (self._where, part)
        )

    def more(self, text: str, logprobs: bytes | None = None) -> bytes:
        self._texts.append(text)
        before = self._delta
        if logprobs is not None:
            before = _delta_head(_DELTAS[self.kind], self._where, b',"logprobs":' + logprobs)
        return self._events.delta(before, text)

    def end(self, status: bytes, logprobs: bytes, encrypts: bool) -> tuple[bytes, bytes]:
        """Return the events that end the item, and the item."""
        text = "".join(self._texts)
        encoded_text = orjson.dumps(text)
        item = self._item(status, text, logprobs, encrypts)
        events = []
        if self.kind == "call":
            assert self._call is not None
            name = orjson.dumps(self._call["function"]["name"])
            events.append(
                self._events.event(
                    b"response.function_call_arguments.done",
                    b'%b,"name":%b,"arguments":%b' % (self._where, name, encoded_text),
                )
            )
        else:
            if self.kind == "content":
                kind, more = b"response.output_text.done", b',"logprobs":' + logprobs
                part = _text_part(text, logprobs)
            else:
                kind, more = b"response.reasoning_text.done", b""
                part = _reasoning_part(text)
            fields = b'%b%b,"text":%b' % (self._where, more, encoded_text)
            events.append(self._events.event(kind, fields))
            events.append(
                self._events.event(
                    b"response.content_part.done", b'%b,"part":%b' % (self._where, part)
                )
            )
        events.append(
            self._events.event(
                b"response.output_item.done", b'"output_index":%d,"item":%b' % (self._index, item)
            )
        )
        return b"".join(events), item

    def _item(
        self, status: bytes, text: str | None, logprobs: bytes = b"[]", encrypts: bool = False
    ) -> bytes:
        return item_bytes(self.kind, self._id, text, self._call, status, logprobs, encrypts)


def item_bytes(
    kind: str,
    id: str,
    text: str | None,
    call: dict[str, Any] | None,
    status: bytes,
    logprobs: bytes,
    encrypts: bool,
) -> bytes:
    """Return an item's JSON; ``text`` is None while the item has none yet."""
    if kind == "content":
        part = b"" if text is None else _text_part(text, logprobs)
        return b'{"id":"%b","type":"message","status":"%b","role":"assistant","content":[%b]}' % (
            id.encode(),
            status,
            part,
        )
    if kind == "reasoning":
        part = b"" if text is None else _reasoning_part(text)
        hidden = b',"encrypted_content":"%b"' % encoded(text).encode() if encrypts and text else b""
        return b'{"id":"%b","type":"reasoning","summary":[],"content":[%b]%b,"status":"%b"}' % (
            id.encode(),
            part,
            hidden,
            status,
        )
    assert call is not None
    return b'{"id":"%b","type":"function_call","status":"%b",%b,"arguments":%b}' % (
        id.encode(),
        status,
        orjson.dumps({"call_id": call["id"], "name": call["function"]["name"]})[1:-1],
        orjson.dumps(text or ""),
    )


def _text_part(text: str, logprobs: bytes) -> bytes:
    return b'{"type":"output_text","text":%b,"annotations":[],"logprobs":%b}' % (
        orjson.dumps(text),
        logprobs,
    )


def _reasoning_part(text: str) -> bytes:
    return b'{"type":"reasoning_text","text":%b}' % orjson.dumps(text)
