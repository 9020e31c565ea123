"""One sampled answer by itself: its text, its tokens, its reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from any_agent.record.content_removal import lacks_texts
from any_agent.types import Interaction, Message

_ENDINGS = ("stop", "length", "tool_calls", "content_filter", "function_call")


@dataclass(eq=False)
class CompletionWithTokenLogpReward:
    """One model call's output, without its place among the others of its session.

    An :class:`~any_agent.record.InteractionWithTokenLogpReward` also knows its prompt and its
    parent.
    """

    id: str
    text: str
    token_ids: list[int]
    """The output's, shape [output length]."""
    logprobs: list[float]
    """These tokens', in nats, shape [output length]."""
    reward: float | None = None
    """Its own, before anything runs back through the session."""
    versions: list[int] = field(default_factory=list)
    """The version that sampled each token, shape [output length]; empty: not known."""
    messages: list[Message] = field(default_factory=list)
    """The request's; empty: not known."""

    @classmethod
    def of(cls, interaction: Interaction, messages: Sequence[Message] = ()) -> Self:
        """The output of a recorded call; ``messages`` are its whole request's."""
        return cls(
            interaction.id,
            str(interaction.output_message.get("content") or ""),
            interaction.output_ids.tolist(),
            interaction.output_logprobs.tolist(),
            interaction.reward,
            interaction.output_versions.tolist(),
            list(messages),
        )


def chat_completion_of(interaction: Interaction, prompt_tokens: int) -> dict[str, Any] | None:
    """A recorded call as an object of OpenAI's chat completions; None if its texts were not kept.

    Its one choice has the index 0. An aborted answer has the finish reason ``length``, and one that
    ended in a way that OpenAI does not know ``stop``.
    """
    if lacks_texts(interaction):
        return None
    output = len(interaction.output_ids)
    reason = interaction.finish_reason
    if reason not in _ENDINGS:
        reason = "length" if reason == "abort" else "stop"
    return {
        "id": interaction.id,
        "object": "chat.completion",
        "created": int(interaction.created_at),
        "model": interaction.model,
        "choices": [
            {
                "index": 0,
                "message": {
                    "content": None,
                    "refusal": None,
                    **interaction.output_message,
                    "role": "assistant",
                },
                "finish_reason": reason,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output,
            "total_tokens": prompt_tokens + output,
        },
    }
