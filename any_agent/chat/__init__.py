"""Messages to token ids and back: rendering, exact continuation, parsing, conversation keys."""

from __future__ import annotations

from any_agent.chat.format import ChatFormat
from any_agent.chat.keys import chain_keys, normalise
from any_agent.chat.load import load_chat_format
from any_agent.chat.messages import text_of, validate_messages, validate_tools
from any_agent.chat.output.machine import MessageDelta, ParsedMessage
from any_agent.chat.output.stream import StreamParser

__all__ = [
    "ChatFormat",
    "MessageDelta",
    "ParsedMessage",
    "StreamParser",
    "chain_keys",
    "load_chat_format",
    "normalise",
    "text_of",
    "validate_messages",
    "validate_tools",
]
