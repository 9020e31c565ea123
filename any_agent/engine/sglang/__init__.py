"""A real SGLang server as an engine."""

from any_agent.engine.sglang.client import (
    SGLangEngine,
)

__all__ = [
    "SGLangEngine",
]
