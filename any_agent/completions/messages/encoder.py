"""`/v1/messages`: its answers, whole and streaming.

A stream has a block for each of the answer's parts, one after another, and they are the blocks of
the whole answer. A call's input is buffered until it is complete: Anthropic's SDK fails at one that
turns out to be no JSON, and only a complete input can be encoded so that it is recognised later.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import orjson

from any_agent.completions.call_types import Delta, Head
from any_agent.completions.encoders.output_order import OutputPart, parts_of
from any_agent.completions.messages.parse import MessagesCall
from any_agent.completions.messages.tool_use import input_of, tool_use_id
from any_agent.errors import AnyAgentError
from any_agent.protocol.error_bodies import anthropic_body
from any_agent.types import Interaction

_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}
_CUT_OFF = "max_tokens"


class MessagesEncoder:
    """Encodes one call's answer. The part that all its events share is encoded once."""

    def __init__(self, call: MessagesCall, head: Head) -> None:
        self._call = call
        self._head = head
        self._message = orjson.dumps(
            {"id": head.id, "type": "message", "role": "assistant", "model": call.chat.model}
        )[:-1]
        self._blocks = 0
        """The number of blocks that have ended."""
        self._open: str | None = None
        """The kind of the open block."""
        self._has_output = False
        """True once there was text or a call."""
        self._delta = b""
        """The beginning of the open block's delta events, up to the text."""
        self._signature = _Signature()
        self._input: list[str] | None = None
        """The pieces of the open call's input."""

    def whole(self, answers: list[Interaction]) -> bytes:
        (interaction,) = answers
        parts = parts_of(interaction)
        blocks = [self._block(part) for part in parts]
        if not any(part.kind != "reasoning" for part in parts):
            # Agents that read the first text must find one.
            blocks.append(b'{"type":"text","text":""}')
        return b'%b,"content":[%b],%b,"stop_details":null,"usage":%b}' % (
            self._message,
            b",".join(blocks),
            self._stopped(interaction),
            self._usage(len(interaction.output_ids)),
        )

    def start(self, index: int) -> bytes:
        return _event(
            b"message_start",
            b'"message":%b,"content":[],"stop_reason":null,"stop_sequence":null,'
            b'"stop_details":null,"usage":%b}' % (self._message, self._usage(0)),
        )

    def delta(self, item: Delta) -> bytes:
        message = item.message
        text = message.content
        if text and self._open == "text" and not (message.reasoning_content or message.tool_calls):
            # A fast path: nearly every event is one of these.
            return b"%b%b}}\n\n" % (self._delta, orjson.dumps(text))
        out: list[bytes] = []
        if message.reasoning_content:
            self._think(out, message.reasoning_content)
        if text:
            if self._open != "text":
                self._begin(out, "text", b'{"type":"text","text":""}', b"text_delta", b"text")
            out.append(b"%b%b}}\n\n" % (self._delta, orjson.dumps(text)))
        for step in message.tool_calls or ():
            self._call_step(out, step)
        return b"".join(out)

    def end(self, index: int, interaction: Interaction) -> bytes:
        out: list[bytes] = []
        self._close(out)
        if not self._has_output:
            self._begin(out, "text", b'{"type":"text","text":""}', b"text_delta", b"text")
            self._close(out)
        fields = b'"delta":{%b,"stop_details":null},"usage":%b' % (
            self._stopped(interaction),
            self._usage(len(interaction.output_ids)),
        )
        out.append(_event(b"message_delta", fields))
        return b"".join(out)

    def last(self, answers: list[Interaction]) -> bytes:
        return _STOP

    def failed(self, error: AnyAgentError) -> bytes:
        return b"event: error\ndata: %b\n\n" % orjson.dumps(anthropic_body(error))

    def _think(self, out: list[bytes], text: str) -> None:
        if self._open != "thinking":
            empty = b'{"type":"thinking","thinking":"","signature":""}'
            self._begin(out, "thinking", empty, b"thinking_delta", b"thinking")
            self._signature = _Signature()
        self._signature.add(text)
        if not self._call.hides_thinking:
            out.append(b"%b%b}}\n\n" % (self._delta, orjson.dumps(text)))

    def _call_step(self, out: list[bytes], step: dict[str, Any]) -> None:
        function = step["function"]
        if "id" in step:
            block = _tool_use(step["id"], function["name"], b"{}")
            self._begin(out, "tool_use", block, b"input_json_delta", b"partial_json")
            self._input = []
        assert self._input is not None
        self._input.append(function["arguments"])

    def _begin(self, out: list[bytes], kind: str, block: bytes, delta: bytes, field: bytes) -> None:
        self._close(out)
        self._open = kind
        self._has_output = self._has_output or kind != "thinking"
        out.append(
            _event(b"content_block_start", b'"index":%d,"content_block":%b' % (self._blocks, block))
        )
        self._delta = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (self._blocks, delta, field)
        )

    def _close(self, out: list[bytes]) -> None:
        """End the open block, if there is one."""
        if self._open is None:
            return
        if self._input is not None:
            written = input_of("".join(self._input)).decode()
            out.append(b"%b%b}}\n\n" % (self._delta, orjson.dumps(written)))
            self._input = None
        if self._open == "thinking":
            fields = b'"index":%d,"delta":{"type":"signature_delta","signature":"%b"}' % (
                self._blocks,
                self._signature.text(),
            )
            out.append(_event(b"content_block_delta", fields))
        out.append(_event(b"content_block_stop", b'"index":%d' % self._blocks))
        self._open = None
        self._blocks += 1

    def _block(self, part: OutputPart) -> bytes:
        if part.call is not None:
            return _tool_use(part.call["id"], part.call["function"]["name"], input_of(part.text))
        if part.kind == "content":
            return b'{"type":"text","text":%b}' % orjson.dumps(part.text)
        signature = _Signature()
        signature.add(part.text)
        shown = "" if self._call.hides_thinking else part.text
        return b'{"type":"thinking","thinking":%b,"signature":"%b"}' % (
            orjson.dumps(shown),
            signature.text(),
        )

    def _stopped(self, interaction: Interaction) -> bytes:
        reason = _REASONS.get(interaction.finish_reason, _CUT_OFF)
        stops, k = self._call.chat.gconfig.stop, interaction.request.get("matched_stop")
        sequence = None
        if reason == "end_turn" and k is not None and k < len(stops):
            reason, sequence = "stop_sequence", stops[k]
        return b'"stop_reason":"%b","stop_sequence":%b' % (reason.encode(), orjson.dumps(sequence))

    def _usage(self, output: int) -> bytes:
        return (
            b'{"input_tokens":%d,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,'
            b'"output_tokens":%d}' % (self._head.prompt_tokens, output)
        )


class _Signature:
    """The signature of a thinking block: different for each text, and not secret."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=24, person=b"thinking")

    def add(self, text: str) -> None:
        self._hash.update(text.encode(errors="surrogatepass"))

    def text(self) -> bytes:
        return base64.b64encode(self._hash.digest())


def _tool_use(id: str, name: str, given: bytes) -> bytes:
    return b'{"type":"tool_use","id":%b,"name":%b,"input":%b}' % (
        orjson.dumps(tool_use_id(id)),
        orjson.dumps(name),
        given,
    )


def _event(name: bytes, fields: bytes) -> bytes:
    return b'event: %b\ndata: {"type":"%b",%b}\n\n' % (name, name, fields)
