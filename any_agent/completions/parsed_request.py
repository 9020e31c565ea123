"""A checked request with the shape of its answer, and what an answer's headers tell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from any_agent.chat import ChatFormat
from any_agent.completions.call_types import Head
from any_agent.completions.encoders import ResponseEncoder
from any_agent.completions.encoders.chat import ChatEncoder
from any_agent.completions.encoders.logprobs import LogprobsEncoder
from any_agent.completions.encoders.text import TextEncoder
from any_agent.completions.params import (
    TOKEN_LIMITS,
    ChatCall,
    UnknownParameters,
    parse_chat,
    parse_completion,
)
from any_agent.types import GenerationHyperparameters, Interaction, SessionMode

_MANY_ENTRIES = 10_000
"""Log-probabilities of a whole answer that is written in a thread: each takes a microsecond or two,
and 20 for each of 8,000 tokens stopped every stream for a quarter of a second."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked request, whichever API it came by."""

    call: ChatCall
    answer: Callable[[Head, int], ResponseEncoder]
    """The shape of its answer; given what is known before the first token, and the weight version
    of that."""


@dataclass(frozen=True, slots=True)
class ParseRules:
    """What every API's parser is told beside the body."""

    mode: SessionMode
    sampling: GenerationHyperparameters
    model: str
    """What the policy is called where a request names no model."""
    unknown: UnknownParameters = "record"
    """The treatment of unknown parameters."""


def parse_chat_request(body: Any, rules: ParseRules, chat: ChatFormat) -> ParsedRequest:
    """Of `/chat/completions`; raises as :func:`parse_chat`."""
    call = parse_chat(
        body,
        mode=rules.mode,
        sampling=rules.sampling,
        model=rules.model,
        known_settings=chat.renderer.known_settings,
        unknown=rules.unknown,
    )
    logprobs = token_logprobs(chat)
    return ParsedRequest(
        call, lambda head, version: ChatEncoder(call, head, logprobs, f"v{version}")
    )


def parse_text_request(body: Any, rules: ParseRules, chat: ChatFormat) -> ParsedRequest:
    """Of `/completions`; raises as :func:`parse_completion`."""
    call = parse_completion(
        body,
        mode=rules.mode,
        sampling=rules.sampling,
        model=rules.model,
        unknown=rules.unknown,
    )
    logprobs = token_logprobs(chat)
    return ParsedRequest(
        call, lambda head, version: TextEncoder(call, head, logprobs, f"v{version}", chat)
    )


@lru_cache(maxsize=4)
def token_logprobs(chat: ChatFormat) -> LogprobsEncoder:
    """Of a chat format: what is written of its tokens is written once."""
    return LogprobsEncoder(chat)


async def whole(answer: ResponseEncoder, call: ChatCall, answers: list[Interaction]) -> bytes:
    """The body of a whole answer; in a thread, if many log-probabilities are told."""
    entries = (1 + call.top_logprobs) * sum(len(a.output_ids) for a in answers)
    if call.logprobs and entries > _MANY_ENTRIES:
        return await asyncio.to_thread(answer.whole, answers)
    return answer.whole(answers)


def version_of(answers: Sequence[Interaction], serving: int) -> int:
    """The weight version of the last token; ``serving``, if there is none yet."""
    sampled = [int(a.output_versions[-1]) for a in answers if len(a.output_versions)]
    return max(sampled, default=serving)


def headers_of(call: ChatCall, head: Head, version: int, session_id: str | None) -> dict[str, str]:
    """The `x-any-agent-*` headers of an answer."""
    out = {"x-any-agent-version": str(version)}
    if head.choices == 1:
        # Several ones' would be longer than many a proxy lets a header be.
        out["x-any-agent-interaction"] = head.id
    if session_id is not None:
        out["x-any-agent-session"] = session_id
    if call.overrides:
        used = {
            name: getattr(head.gconfig, "max_new_tokens" if name in TOKEN_LIMITS else name)
            for name in sorted(call.overrides)
        }
        out["x-any-agent-overrides"] = json.dumps(used)
    if call.ignored:
        out["x-any-agent-ignored"] = ", ".join(call.ignored)
    return out
