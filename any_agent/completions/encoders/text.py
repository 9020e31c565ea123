"""`/v1/completions`: its requests, and its answers, whole and streaming."""

from __future__ import annotations

from typing import Any

import orjson

from any_agent.chat import ChatFormat
from any_agent.completions.call_types import Delta, Head
from any_agent.completions.encoders.chat import DONE, error_event, usage_of
from any_agent.completions.logprobs import LogprobsEncoder, top_logprobs_of
from any_agent.completions.params.call import ChatCall
from any_agent.completions.params.parse import parse_completion
from any_agent.completions.parsed_request import ParseContext, ParsedRequest, token_logprobs
from any_agent.errors import AnyAgentError
from any_agent.types import Interaction


def parse_text_request(body: Any, context: ParseContext) -> ParsedRequest:
    """Check a `/completions` body; raises as :func:`parse_completion`."""
    call = parse_completion(body, context.settings)
    chat, logprobs = context.chat, token_logprobs(context.chat)
    return ParsedRequest(
        call, lambda head, version: TextEncoder(call, head, logprobs, f"v{version}", chat)
    )


class TextEncoder:
    """Encodes one legacy completion's answer."""

    def __init__(
        self,
        call: ChatCall,
        head: Head,
        logprobs: LogprobsEncoder,
        fingerprint: str,
        chat: ChatFormat,
    ) -> None:
        self._call = call
        self._head = head
        self._logprobs = logprobs
        self._chat = chat
        self._base = {
            "id": head.id,
            "object": "text_completion",
            "created": int(head.created_at),
            "model": call.model,
            "system_fingerprint": fingerprint,
        }
        self._sent = [0] * head.choices
        """Characters of each choice's tokens that were reported, for `text_offset`."""

    def whole(self, answers: list[Interaction]) -> bytes:
        choices = [self._choice(k, answer) for k, answer in enumerate(answers)]
        return orjson.dumps(
            {**self._base, "choices": choices, "usage": usage_of(self._head, answers)}
        )

    def start(self, index: int) -> bytes:
        """Return the first event of a choice, where the prompt is echoed."""
        echoed = self._echoed(index)
        return self._event(index, echoed) if echoed else b""

    def delta(self, item: Delta) -> bytes:
        text = item.message.content or ""
        logprobs = None
        if self._call.logprobs and item.output_ids:
            logprobs = self._legacy(item.index, item.output_ids, item.logprobs, item.top_logprobs)
        if not text and logprobs is None:
            return b""
        return self._event(item.index, text, logprobs)

    def end(self, index: int, interaction: Interaction) -> bytes:
        return self._event(index, "", None, interaction.finish_reason)

    def last(self, answers: list[Interaction]) -> bytes:
        if not self._call.include_usage:
            return DONE
        usage = usage_of(self._head, answers)
        return _line({**self._base, "choices": [], "usage": usage}) + DONE

    def failed(self, error: AnyAgentError) -> bytes:
        return error_event(error)

    def _event(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        event = {**self._base, "choices": [choice]}
        if self._call.include_usage:
            event["usage"] = None
        return _line(event)

    def _choice(self, index: int, interaction: Interaction) -> dict[str, Any]:
        logprobs = None
        if self._call.logprobs:
            logprobs = self._legacy(
                index,
                interaction.output_ids.tolist(),
                interaction.output_logprobs.tolist(),
                top_logprobs_of(interaction),
            )
        return {
            "index": index,
            "text": self._echoed(index) + interaction.output_message["content"],
            "logprobs": logprobs,
            "finish_reason": interaction.finish_reason,
        }

    def _legacy(self, index: int, ids: list[int], logprobs: list[float], top: Any) -> Any:
        start = self._sent[index]
        out = self._logprobs.legacy(ids, logprobs, top, start)
        self._sent[index] = start + sum(map(len, out["tokens"]))
        return out

    def _echoed(self, index: int) -> str:
        if not self._call.echo:
            return ""
        given = self._call.prompts[index // self._call.n]
        return given if isinstance(given, str) else self._chat.decode(given)


def _line(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
