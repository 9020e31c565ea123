"""A checked request with the encoder of its answer, and the answers' headers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from any_agent.chat import ChatFormat
from any_agent.completions.call_types import Delta, Head
from any_agent.completions.logprobs import LogprobsEncoder
from any_agent.completions.params.call import ChatCall, ParseSettings
from any_agent.completions.params.sampling import TOKEN_LIMITS
from any_agent.errors import AnyAgentError, InvalidRequest
from any_agent.record import InteractionTree
from any_agent.types import Interaction

UNTRAINABLE_HEADER = "x-any-agent-untrainable"
"""The header with the reason why a train session's call is not trained on."""
ROLE_HEADER = "x-any-agent-role"
"""The header of a request with the name of the agent, of several in a session, that sends it."""
_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MANY_ENTRIES = 10_000
"""Log-probabilities of a whole answer that is encoded in a thread: each takes a microsecond or two,
and 20 for each of 8,000 tokens stopped every stream for a quarter of a second."""


class ResponseEncoder(Protocol):
    """Encodes one call's answer. Events are server-sent ones, with their blank lines."""

    def whole(self, answers: list[Interaction]) -> bytes:
        """Return the body of an answer that is not streamed, with all choices."""

    def start(self, index: int) -> bytes:
        """Return the first events of a choice, or nothing."""

    def delta(self, item: Delta) -> bytes:
        """Return the events of newly certain text, or nothing."""

    def end(self, index: int, interaction: Interaction) -> bytes:
        """Return the events that end a choice, or nothing."""

    def last(self, answers: list[Interaction]) -> bytes:
        """Return the events that end the stream once all choices have ended."""

    def failed(self, error: AnyAgentError) -> bytes:
        """Return the events that end a stream which has begun and cannot go on."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked request of any API."""

    call: ChatCall
    answer: Callable[[Head, int], ResponseEncoder]
    """Make the encoder of the answer, from what is known before the first token and the weight
    version of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseContext(ParseSettings):
    """The facts beside the body that every API's parser gets."""

    chat: ChatFormat
    context_length: int
    """The most tokens of a prompt and its answer."""
    tree: InteractionTree | None = None
    """The session's recorded interactions, if the call has a session."""


def role_in(values: Sequence[str]) -> str:
    """Return the role that the values of the header name, "" without one; InvalidRequest for a
    malformed name, and for two names."""
    names = {value for value in values if value}
    if not names:
        return ""
    if len(names) > 1:
        raise InvalidRequest(
            f"the header {ROLE_HEADER} names {len(names)} roles: send one", param=ROLE_HEADER
        )
    (name,) = names
    if not _ROLE.fullmatch(name):
        raise InvalidRequest(
            f"the header {ROLE_HEADER} is {name[:80]!a}: a role is a letter or a digit, and up to "
            "63 more letters, digits, dots, underscores or hyphens",
            param=ROLE_HEADER,
        )
    return name


def with_role(request: ParsedRequest, role: str) -> ParsedRequest:
    """Return the request with its role in the record of its calls; "" is none."""
    if not role:
        return request
    call = replace(request.call, kept={**request.call.kept, "role": role})
    return replace(request, call=call)


@lru_cache(maxsize=4)
def token_logprobs(chat: ChatFormat) -> LogprobsEncoder:
    """Return the chat format's encoder of log-probabilities, which caches what tokens look like."""
    return LogprobsEncoder(chat)


async def encode_whole(
    encoder: ResponseEncoder, call: ChatCall, answers: list[Interaction]
) -> bytes:
    """Return the body of a whole answer; encode many log-probabilities in a thread."""
    entries = (1 + call.top_logprobs) * sum(len(a.output_ids) for a in answers)
    if call.logprobs and entries > MANY_ENTRIES:
        return await asyncio.to_thread(encoder.whole, answers)
    return encoder.whole(answers)


def version_of(answers: Sequence[Interaction], serving: int) -> int:
    """Return the weight version of the last token; ``serving`` if there is none yet."""
    sampled = [int(a.output_versions[-1]) for a in answers if len(a.output_versions)]
    return max(sampled, default=serving)


def headers_of(
    call: ChatCall,
    head: Head,
    version: int,
    session_id: str | None,
    *,
    train: bool,
    answers: Sequence[Interaction] = (),
) -> dict[str, str]:
    """Return the `x-any-agent-*` headers of an answer, of which ``answers`` are there already.

    ``train``: the call belongs to a train session.
    """
    out = {"x-any-agent-version": str(version)}
    if train:
        why: list[str | None] = [call.untrainable, *(a.untrainable_reason for a in answers)]
        if any(why):
            out[UNTRAINABLE_HEADER] = next(filter(None, why))
    if head.choices == 1:
        # The ids of several choices would be longer than many a proxy lets a header be.
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
