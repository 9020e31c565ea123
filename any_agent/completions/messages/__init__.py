"""Anthropic's `/v1/messages`: its requests as calls, and the shape of its answers.

A request becomes the same ``ChatCall`` that a chat request does, so that recording, continuation
and keys are those of chat, and a session may go from one API to another. LiteLLM has an adapter for
this. It is not used: it re-encodes what a tool was called with, leaves out what makes an answer
known again, and would be imported for a few dozen lines.
"""

from any_agent.completions.messages.asked import parse_messages_request
from any_agent.completions.messages.count import count_tokens
from any_agent.completions.messages.encoder import MessagesEncoder
from any_agent.completions.messages.parse import MessagesCall, parse_count, parse_messages

__all__ = [
    "MessagesCall",
    "MessagesEncoder",
    "count_tokens",
    "parse_count",
    "parse_messages",
    "parse_messages_request",
]
