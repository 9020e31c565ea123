"""`/v1/completions`: its answers, whole and streaming."""

from __future__ import annotations

from typing import Any

import orjson

from any_agent.chat import ChatFormat
from any_agent.completions.call_types import Delta, Head
from any_agent.completions.encoders.chat import ChoicesEncoder
from any_agent.completions.logprobs import LogprobsEncoder, TopLogprobs
from any_agent.completions.params.call import ChatCall
from any_agent.types import Message


class TextEncoder(ChoicesEncoder):
    """Encodes one legacy completion's answer."""

    _object = _event_object = b"text_completion"
    _text_field = b"text"
    _nothing = b'""'

    def __init__(
        self,
        call: ChatCall,
        head: Head,
        logprobs: LogprobsEncoder,
        fingerprint: str,
        chat: ChatFormat,
    ) -> None:
        super().__init__(call, head, logprobs, fingerprint)
        self._chat = chat
        self._sent = [0] * head.choices
        """Characters of each choice's tokens that were reported, for `text_offset`."""

    def start(self, index: int) -> bytes:
        """Return the first event of a choice, where the prompt is echoed."""
        echoed = self._echoed(index)
        return self._event(index, orjson.dumps(echoed)) if echoed else b""

    def delta(self, item: Delta) -> bytes:
        """Return the event of newly certain text; nothing for a delta without content."""
        text, logprobs = item.message.content or "", self._new_logprobs(item)
        if not text and logprobs is None:
            return b""
        return self._event(item.index, orjson.dumps(text), logprobs)

    def _answer(self, index: int, message: Message) -> dict[str, Any]:
        return {"text": self._echoed(index) + message["content"]}

    def _encode_logprobs(
        self, index: int, ids: list[int], logprobs: list[float], top: TopLogprobs | None
    ) -> bytes:
        start = self._sent[index]
        out = self._logprobs.legacy(ids, logprobs, top, start)
        self._sent[index] = start + sum(map(len, out["tokens"]))
        return orjson.dumps(out)

    def _echoed(self, index: int) -> str:
        if not self._call.echo:
            return ""
        given = self._call.prompts[index // self._call.n]
        return given if isinstance(given, str) else self._chat.decode(given)
