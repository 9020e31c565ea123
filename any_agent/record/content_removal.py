"""Interactions without their texts (`sessions.store_content=false`).

Token ids, log-probabilities and versions stay, with everything that training and exact continuation
need: a request is identified by its key, an answer's reasoning by its digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from any_agent.types import Interaction, Message

REASONING_DIGEST = "reasoning_digest"
# fmt: off
_WORDLESS = {
    "adapter", "bound", "forced", "matched_stop", "mixed_cache", "order", "role", "text",
    "top_logprobs", "vetoed",
}
# fmt: on
"""The fields that a request's record keeps: numbers, digests, the role and the adapter."""


def strip_content(interaction: Interaction) -> Interaction:
    """Return a copy without messages, tools, stop strings, grammar and merely recorded fields."""
    answer = interaction.output_message
    kept: Message = {"role": answer.get("role", "assistant")}
    if reasoning := answer.get("reasoning_content"):
        kept[REASONING_DIGEST] = _digest(reasoning)
    return replace(
        interaction,
        message_delta=[],
        output_message=kept,
        tools=None,
        gconfig=interaction.gconfig.new(stop=(), grammar=None),
        request={key: value for key, value in interaction.request.items() if key in _WORDLESS},
    )


def lacks_texts(interaction: Interaction) -> bool:
    """Return whether the interaction's texts were left out."""
    return "content" not in interaction.output_message


def has_reasoning(message: Message, reasoning: str) -> bool:
    """Compare an answer's reasoning, or its digest, with a text; outer white space is ignored."""
    own = message.get("reasoning_content")
    if isinstance(own, str):
        return own.strip() == reasoning.strip()
    return bool(message.get(REASONING_DIGEST) == _digest(reasoning))


def _digest(text: str) -> str:
    data = text.strip().encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()
