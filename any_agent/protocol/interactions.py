"""The wire models of single interactions, as people look at them: in pages, long texts cut."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from any_agent.protocol.rl import StrictBody

MAX_PAGE = 100
MAX_TOKENS = 8192


class ListInteractions(StrictBody):
    """A page of a session's interactions, in a URL."""

    model_config = ConfigDict(strict=False)

    start: int = Field(default=0, ge=0, le=10**9)
    """The number of interactions before the page."""
    limit: int = Field(default=20, ge=1, le=MAX_PAGE)


class ListTokens(StrictBody):
    """A part of one interaction's tokens, in a URL."""

    model_config = ConfigDict(strict=False)

    start: int = Field(default=0, ge=0, le=10**9)
    """The number of tokens before the part."""
    limit: int = Field(default=4096, ge=1, le=MAX_TOKENS)


class InteractionView(BaseModel):
    """One interaction without its tokens."""

    id: str
    parent_id: str | None
    number: int
    """Its place in the session, from 1."""
    depth: int
    """The number of its ancestors."""
    role: str
    """The agent of the session that made the call; "" for one without a name."""
    adapter: str | None = None
    """The adapter of `engine.adapters` that sampled the answer, `NAME@FINGERPRINT`, with a digest
    of its files; null: the policy itself."""
    created_at: float
    """Seconds since the epoch."""
    message_delta: list[dict[str, Any]]
    """The messages that follow its parent's messages and answer."""
    output_message: dict[str, Any]
    finish_reason: str
    continuation: str
    """The way in which its prompt continues the session: `exact`, `branch` or `root`."""
    branch_reason: str | None
    """The reason why it continues no interaction exactly."""
    untrainable_reason: str | None
    """The reason why its tokens are never trained on; `discarded`: another answer to the same
    request was continued."""
    reward: float | None
    """Its own reward."""
    propagated: float | None
    """The reward after the rewards have run back through the tree; null in a session without
    any."""
    prompt_tokens: int
    new_prompt_tokens: int
    """The prompt's tokens that follow its parent's prompt and output."""
    output_tokens: int
    first_version: int | None
    """The weight version of its first output token."""
    last_version: int | None
    """The weight version of its last output token."""
    logprob_mean: float | None
    """The mean log-probability of its output tokens."""


class InteractionPage(BaseModel):
    """Interactions in the order of their creation. A page may be short; texts may be cut."""

    session_id: str
    total: int
    start: int
    next: int | None
    """The start of the next page; null: this is the last one."""
    score: float | None
    """The session's score, the mean of `propagated` over all calls that training counts: a missing
    reward is 0. Null if it counts none."""
    cut: bool
    """True if a text was too long and is not shown to its end."""
    interactions: list[InteractionView]


class InteractionTokens(BaseModel):
    """A part of an interaction's tokens: its new prompt tokens, then its output."""

    interaction_id: str
    start: int
    total: int
    prompt: int
    """The number of prompt tokens among all of them; output begins there."""
    trained: bool
    """True if its output tokens may enter the loss, or some of them."""
    loss_mask: list[int]
    """1 for each token that may: not for the prompt's, nor for those that a grammar decided."""
    ids: list[int]
    texts: list[str] | None
    """The text that each token completes; null where the run stores no texts."""
    logprobs: list[float | None]
    """Null for tokens of the prompt."""
    versions: list[int | None]
    """Null for tokens of the prompt."""
