"""What runs each block of docs/how-to/connect, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

CALL = '<tool_call>\n{"name": "%s", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@dataclass(frozen=True, slots=True)
class Case:
    """One block. ``says``: what the model answers, a call each."""

    says: tuple[str, ...] = ("3.",)
    prints: str = "3."
    sessions: int = 1
    """Opened by it; each makes as many calls, and each goes on from the one before it."""


HOW_A_CLASS_IS_RUN = "README/try"
"""This block runs the blocks named `agent` of all pages."""
PYTHON: dict[str, tuple[str, ...]] = {
    "anthropic": ("anthropic",),
    "camel": ("camel",),
    "claude-agent-sdk": ("claude-agent",),
    "instructor": ("instructor",),
    "langchain": ("langchain",),
    "langgraph": ("langgraph",),
    "llama-index": ("llama-index",),
    "openai-agents": ("openai-agents",),
    "openai-python": ("openai-2", "openai-3"),
    "pydantic-ai": ("pydantic-ai",),
    "smolagents": ("smolagents",),
}
"""Pages whose Python needs environments, by their names; the others' runs in this one."""

_ONCE = Case()
_WITH_TOOL = Case(says=(CALL % "add", "It is 3."), prints="1.0")
CASES: dict[str, Case] = {
    "any-program/run": Case(says=("3.", "3."), prints="", sessions=2),
    "anthropic/agent": _WITH_TOOL,
    "anthropic/session": _ONCE,
    "camel/agent": _WITH_TOOL,
    "camel/session": _ONCE,
    "claude-agent-sdk/agent": Case(says=(CALL % "mcp__sums__add", "It is 3."), prints="1.0"),
    "claude-agent-sdk/session": _ONCE,
    "curl/session": _ONCE,
    # What follows the opening of a forced call.
    "instructor/session": Case(says=(' {"total": 3}}\n</tool_call>',), prints="3"),
    "langchain/agent": _WITH_TOOL,
    "langchain/anthropic": _ONCE,
    "langchain/session": _ONCE,
    "langgraph/agent": _WITH_TOOL,
    "langgraph/session": _ONCE,
    "litellm/agent": _WITH_TOOL,
    "litellm/anthropic": _ONCE,
    "litellm/program": Case(prints="3.\n1"),
    "litellm/session": _ONCE,
    "llama-index/agent": _WITH_TOOL,
    "llama-index/session": _ONCE,
    "openai-agents/agent": _WITH_TOOL,
    "openai-agents/session": _ONCE,
    "openai-node/program": Case(prints="3.\n1"),
    "openai-node/run": Case(says=("3.", "3."), prints="", sessions=2),
    "openai-node/session": _ONCE,
    "openai-python/agent": _WITH_TOOL,
    "openai-python/responses": Case(says=("3.", "4."), prints="3. 4."),
    "openai-python/session": _ONCE,
    "pydantic-ai/agent": _WITH_TOOL,
    "pydantic-ai/program": Case(prints="3.\n1"),
    "pydantic-ai/session": _ONCE,
    "smolagents/session": Case(says=(' {"answer": "3."}}\n</tool_call>',)),
}
