"""A `/v1/messages` body as a checked request with the shape of its answer."""

from __future__ import annotations

from typing import Any

from any_agent.chat import ChatFormat
from any_agent.completions.messages.encoder import MessagesEncoder
from any_agent.completions.messages.parse import parse_messages
from any_agent.completions.parsed_request import ParsedRequest, ParseRules


def parse_messages_request(body: Any, rules: ParseRules, chat: ChatFormat) -> ParsedRequest:
    """Raises as :func:`parse_messages`."""
    call = parse_messages(
        body,
        mode=rules.mode,
        sampling=rules.sampling,
        model=rules.model,
        known_settings=chat.renderer.known_settings,
        unknown=rules.unknown,
    )
    return ParsedRequest(call.chat, lambda head, version: MessagesEncoder(call, head))
