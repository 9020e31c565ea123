"""`usage` as OpenAI's answers have it."""

from __future__ import annotations

from typing import Any

from any_agent.completions.call_types import Head
from any_agent.types import Interaction


def usage_of(head: Head, answers: list[Interaction]) -> dict[str, Any]:
    """The prompt once, and the tokens of every choice."""
    output = sum(len(answer.output_ids) for answer in answers)
    return {
        "prompt_tokens": head.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": head.prompt_tokens + output,
    }
