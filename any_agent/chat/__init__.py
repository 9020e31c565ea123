"""Messages to token ids and back: rendering, exact continuation, parsing, conversation hashes."""

from __future__ import annotations

from any_agent.chat.conversation_hash import chain_keys as chain_keys
from any_agent.chat.conversation_hash import key_parts as key_parts
from any_agent.chat.conversation_hash import normalise as normalise
from any_agent.chat.format import ChatFormat as ChatFormat
from any_agent.chat.load import chat_format_for as chat_format_for
from any_agent.chat.load import load_chat_format as load_chat_format
from any_agent.chat.load import load_hf_tokenizer as load_hf_tokenizer
from any_agent.chat.message_validation import reasoning_of as reasoning_of
from any_agent.chat.message_validation import text_of as text_of
from any_agent.chat.output.message import MessageDelta as MessageDelta
from any_agent.chat.output.message import ParsedMessage as ParsedMessage
from any_agent.chat.output.message import merge_deltas as merge_deltas
from any_agent.chat.output.stream_parser import StreamParser as StreamParser
