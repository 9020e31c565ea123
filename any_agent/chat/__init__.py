"""Messages to token ids and back: rendering, exact continuation, parsing, conversation hashes."""

from __future__ import annotations

from any_agent.chat.conversation_hash import chain_keys, key_parts, normalise
from any_agent.chat.format import ChatFormat
from any_agent.chat.load import chat_format_for, load_chat_format, load_hf_tokenizer
from any_agent.chat.message_validation import (
    reasoning_of,
    text_of,
    validate_messages,
    validate_tools,
)
from any_agent.chat.output.message import MessageDelta, ParsedMessage, merge_deltas
from any_agent.chat.output.stream_parser import StreamParser

__all__ = [
    "ChatFormat",
    "MessageDelta",
    "ParsedMessage",
    "StreamParser",
    "chain_keys",
    "chat_format_for",
    "key_parts",
    "load_chat_format",
    "load_hf_tokenizer",
    "merge_deltas",
    "normalise",
    "reasoning_of",
    "text_of",
    "validate_messages",
    "validate_tools",
]
