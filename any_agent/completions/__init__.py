"""One chat request + one interaction tree -> one recorded completion."""

from any_agent.completions.complete import (
    VERSION_GONE,
    Completed,
    Completer,
    Completion,
    Delta,
    Prepared,
)
from any_agent.completions.params import ChatCall, parse_chat

__all__ = [
    "VERSION_GONE",
    "ChatCall",
    "Completed",
    "Completer",
    "Completion",
    "Delta",
    "Prepared",
    "parse_chat",
]
