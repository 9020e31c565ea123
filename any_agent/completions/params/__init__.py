"""What an agent may ask for: every parameter of both routes, in three classes."""

from any_agent.completions.params.parse import (
    HARMLESS,
    HONOURED,
    NEUTRAL,
    ChatCall,
    parse_chat,
)

__all__ = ["HARMLESS", "HONOURED", "NEUTRAL", "ChatCall", "parse_chat"]
