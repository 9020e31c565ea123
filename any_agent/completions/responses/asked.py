"""A Responses request, checked, with the shape of its answer."""

from __future__ import annotations

from typing import Any

from any_agent.chat import ChatFormat
from any_agent.completions.parsed_request import ParsedRequest, ParseRules, token_logprobs
from any_agent.completions.responses.encoder import ResponsesEncoder
from any_agent.completions.responses.parse import parse_responses
from any_agent.record import InteractionTree


def parse_responses_request(
    body: Any,
    rules: ParseRules,
    chat: ChatFormat,
    tree: InteractionTree | None,
    *,
    context_length: int,
) -> ParsedRequest:
    """Raises as :func:`parse_responses`. ``tree``: the session's, with its earlier answers."""
    call = parse_responses(
        body,
        mode=rules.mode,
        sampling=rules.sampling,
        model=rules.model,
        tree=tree,
        known_settings=chat.renderer.known_settings,
        unknown=rules.unknown,
        context_length=context_length,
    )
    logprobs = token_logprobs(chat)
    return ParsedRequest(call.chat, lambda head, _: ResponsesEncoder(call, head, logprobs, chat))
