"""A `/v1/messages` body as a checked request with the shape of its answer."""

from __future__ import annotations

from typing import Any

from any_agent.chat import ChatFormat
from any_agent.completions.messages.encoder import MessagesAnswer
from any_agent.completions.messages.parse import parse_messages
from any_agent.completions.parsed_request import Asked, Rules


def messages_asked(body: Any, rules: Rules, chat: ChatFormat) -> Asked:
    """Raises as :func:`parse_messages`."""
    call = parse_messages(
        body,
        mode=rules.mode,
        sampling=rules.sampling,
        model=rules.model,
        known_settings=chat.writer.known_settings,
        unknown=rules.unknown,
    )
    return Asked(call.chat, lambda head, version: MessagesAnswer(call, head))
