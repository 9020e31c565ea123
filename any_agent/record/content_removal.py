"""Interactions without what was said in them (`sessions.store_content=false`).

Token ids, log-probabilities and versions stay, and so does everything that training and exact
continuation need: a request is known by its key, an answer's reasoning by its digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from any_agent.types import Interaction, Message

REASONING_DIGEST = "reasoning_digest"
_WORDLESS = {"mixed_cache", "text", "top_logprobs", "forced", "matched_stop", "order"}
"""What a request's record keeps: numbers and digests."""


def strip_content(interaction: Interaction) -> Interaction:
    """A copy without messages, tools, stop strings, a grammar, and what was only recorded."""
    said = interaction.output_message
    kept: Message = {"role": said.get("role", "assistant")}
    if reasoning := said.get("reasoning_content"):
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
    """Whether they were left out."""
    return "content" not in interaction.output_message


def has_reasoning(message: Message, reasoning: str) -> bool:
    """Whether this is the reasoning of an answer, whose texts may have been left out.

    White space around it does not count.
    """
    said = message.get("reasoning_content")
    if isinstance(said, str):
        return said.strip() == reasoning.strip()
    return bool(message.get(REASONING_DIGEST) == _digest(reasoning))


def _digest(text: str) -> str:
    data = text.strip().encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()
