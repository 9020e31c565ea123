"""The vocabulary that every part shares: model calls, interactions, sessions.

Arrays are numpy, token data is packed: ids and versions are int32, log-probabilities float32.
Nothing here imports torch or LiteLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

IdArray: TypeAlias = npt.NDArray[np.int32]
"""Token ids or weight versions, int32, shape [length]."""
LogprobArray: TypeAlias = npt.NDArray[np.float32]
"""Natural-log probabilities, float32, shape [length]."""

Message: TypeAlias = dict[str, Any]
"""One chat message in OpenAI's form: role, content, tool_calls, tool_call_id, reasoning_content."""
Tool: TypeAlias = dict[str, Any]
"""One tool in OpenAI's form: ``{"type": "function", "function": {...}}``."""

StopReason: TypeAlias = Literal["stop", "length", "abort"]

BranchReason: TypeAlias = Literal[
    "no_new_message",
    "template_declines",
    "thinking_stripped",
    "assistant_rewritten",
    "parent_aborted",
    "tools_changed",
    "system_changed",
    "history_rewritten",
    "new_conversation",
]
"""Why an interaction does not continue an earlier one of its session:

=======================  ==========================================================================
``no_new_message``       no message follows the recorded answer
``template_declines``    the template cannot put the new messages behind the recorded ids
``thinking_stripped``    the template takes the recorded answer's reasoning out of the past
``assistant_rewritten``  an answer among the messages is not as it was recorded
``parent_aborted``       it goes on from an answer that was cut off
``tools_changed``        the same conversation with other tools, or template arguments
``system_changed``       the same conversation under another system prompt
``history_rewritten``    no answer stands as it was recorded, under a known system prompt and tools
``new_conversation``     nothing that was recorded is in it
=======================  ==========================================================================
"""


def id_array(values: Any) -> IdArray:
    """Pack token ids or versions as int32."""
    return np.asarray(values, dtype=np.int32)


def plain_ids(ids: Sequence[int] | IdArray) -> list[int]:
    """As Python's own ints: tokenizers refuse numpy's."""
    return list(ids.tolist()) if isinstance(ids, np.ndarray) else list(ids)


def logprob_array(values: Any) -> LogprobArray:
    """Pack log-probabilities as float32."""
    return np.asarray(values, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class GenerationHyperparameters:
    """How one completion is sampled.

    ``temperature`` 0 means greedy. ``top_k`` -1 means off. Stop strings end the output at the
    token that completes one; ``stop_token_ids`` at the token itself (kept in the output).
    With ``seed``, a signed 64-bit integer, the draw of a token depends on nothing but its
    distribution, the seed and its position in prompt + output. What comes after it bends the
    distribution itself, and is neutral by default.
    """

    max_new_tokens: int = 16_384
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are never drawn."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits."""
    grammar: str | None = None
    """What the output's text must be, as JSON: ``{"json_schema": {...}}``,
    ``{"json_object": true}`` or ``{"regex": "..."}``."""

    def new(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request to an inference engine: token ids in, token ids out."""

    rid: str
    input_ids: list[int] | IdArray
    gconfig: GenerationHyperparameters
    cache_salt: str | None = None
    top_logprobs: int = 0
    """How many of the likeliest tokens to tell of at each position."""


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """Some freshly sampled tokens of one request, in order; only the last chunk has a stop reason.

    ``logprobs[k]`` is log-softmax(logits / T) of ``output_ids[k]`` under the weights of
    ``versions[k]``; no renormalisation by top_p or top_k.
    """

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason | None = None
    matched_stop: str | int | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """Per token the likeliest ids and their log-probabilities, best first; None if not asked."""

    def __post_init__(self) -> None:
        n = len(self.output_ids)
        if not n == len(self.logprobs) == len(self.versions):
            raise ValueError("a chunk needs one logprob and one version per token")
        if self.top_logprobs is not None and len(self.top_logprobs) != n:
            raise ValueError("a chunk needs the likeliest tokens of each of its tokens, or none")


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """A whole completion: the concatenation of its chunks."""

    input_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    matched_stop: str | int | None = None


class Continuation(StrEnum):
    """How an interaction's prompt relates to what was recorded before it."""

    ROOT = "root"
    """No recorded interaction is a prefix of the request's messages."""
    EXACT = "exact"
    """Its prompt begins with the parent's prompt + output ids."""
    BRANCH = "branch"
    """A parent's messages match, but its ids could not be continued; rendered anew as a root."""


@dataclass(slots=True)
class Interaction:
    """One recorded model call, stored as what it adds to its parent.

    The prompt is the parent's prompt + the parent's output + ``prompt_delta_ids`` (without a
    parent: ``prompt_delta_ids`` alone), and the messages likewise: the parent's messages + the
    parent's ``output_message`` + ``message_delta``. :class:`any_agent.record.InteractionTree`
    puts them together.
    """

    id: str
    session_id: str
    parent_id: str | None
    prompt_delta_ids: IdArray
    output_ids: IdArray
    output_logprobs: LogprobArray
    output_versions: IdArray
    message_delta: list[Message]
    output_message: Message
    finish_reason: str
    gconfig: GenerationHyperparameters
    model: str = ""
    tools: list[Tool] | None = None
    """Of a root; an exact child's are its root's."""
    continuation: Continuation = Continuation.ROOT
    branch_reason: str | None = None
    """A :data:`BranchReason`; of a branch, and of a root that is not its session's first."""
    untrainable_reason: str | None = None
    reward: float | None = None
    """Its own reward, before anything runs back through the tree."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """What the agent asked for and the run overrode or only recorded."""
    created_at: float = 0.0

    def __post_init__(self) -> None:
        n = len(self.output_ids)
        if not n == len(self.output_logprobs) == len(self.output_versions):
            raise ValueError(f"interaction {self.id}: one logprob and one version per output token")

    @property
    def trainable(self) -> bool:
        """Whether its tokens may enter the loss; if not, ``untrainable_reason`` says why."""
        return self.untrainable_reason is None


class SessionMode(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class SessionState(StrEnum):
    OPEN = "open"
    AWAITING_REWARD = "awaiting_reward"
    """Its agent is done; its reward is not there yet."""
    FINALIZED = "finalized"
    LEASED = "leased"
    TRAINED = "trained"
    REJECTED = "rejected"
    EVALUATED = "evaluated"
    EXPIRED = "expired"
    ABORTED = "aborted"


TERMINAL_STATES = frozenset(
    {
        SessionState.TRAINED,
        SessionState.REJECTED,
        SessionState.EVALUATED,
        SessionState.EXPIRED,
        SessionState.ABORTED,
    }
)


@dataclass(slots=True)
class Trajectory:
    """One finalized session as the trainer receives it.

    ``interactions`` are in the order of their creation, parents before children.
    """

    session_id: str
    group_id: str
    """The generation of the group it closed with; a group of one has its session's id."""
    interactions: list[Interaction]
    final_reward: float | None = None
    task_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
