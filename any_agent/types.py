"""The types that all packages share: model calls, interactions, sessions.

Arrays are numpy's and token data is packed: ids and versions are int32, log-probabilities float32.
The module imports neither torch nor LiteLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from any_agent.model_calls import GenerationChunk as GenerationChunk
from any_agent.model_calls import GenerationHyperparameters as GenerationHyperparameters
from any_agent.model_calls import IdArray as IdArray
from any_agent.model_calls import LLMRequest as LLMRequest
from any_agent.model_calls import Message as Message
from any_agent.model_calls import ModelRequest as ModelRequest
from any_agent.model_calls import ModelResponse as ModelResponse
from any_agent.model_calls import StopReason as StopReason

LogprobArray: TypeAlias = npt.NDArray[np.float32]
"""Natural logarithms of probabilities, float32, shape [length]."""
Row: TypeAlias = dict[str, npt.NDArray[Any]]
"""One sequence, unshifted, shapes [seq_len]:

=================  =======  ====================================
``input_ids``      int32
``loss_mask``      int32    1 on the outputs to be trained
``logprobs``       float32  of the sampled tokens, 0 on prompts
``versions``       int32    of the weights, -1 on prompts
``attention_mask`` bool     all true
``rewards``        float32  a scalar, shape []
``cut``            bool     optional: on outputs that the limit of tokens cut off
=================  =======  ====================================
"""

Tool: TypeAlias = dict[str, Any]
"""One tool in OpenAI's form: ``{"type": "function", "function": {...}}``."""

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
"""The reason why an interaction does not continue an earlier one of its session:

=======================  ==========================================================================
``no_new_message``       no message follows the recorded answer
``template_declines``    the template cannot append the new messages to the recorded ids
``thinking_stripped``    the template removes the recorded answer's reasoning
``assistant_rewritten``  an answer among the messages differs from the recorded one
``parent_aborted``       the answer that it continues was cut off
``tools_changed``        the same conversation with other tools, or template arguments
``system_changed``       the same conversation with another system prompt
``history_rewritten``    every recorded answer was changed; system prompt and tools are known
``new_conversation``     it contains nothing that was recorded
=======================  ==========================================================================
"""


def id_array(values: Any) -> IdArray:
    """Pack token ids or versions as int32."""
    return np.asarray(values, dtype=np.int32)


def plain_ids(ids: Sequence[int] | IdArray) -> list[int]:
    """Return the ids as Python's ints, since tokenizers refuse numpy's."""
    return list(ids.tolist()) if isinstance(ids, np.ndarray) else list(ids)


def logprob_array(values: Any) -> LogprobArray:
    """Pack log-probabilities as float32."""
    return np.asarray(values, dtype=np.float32)


def runs_of(flags: Sequence[int]) -> list[list[int]]:
    """Return the runs [start, end) of true flags, in order."""
    edges = np.flatnonzero(np.diff(np.asarray(flags, np.bool_), prepend=False, append=False))
    return [list(map(int, run)) for run in edges.reshape(-1, 2)]


class Continuation(StrEnum):
    """The relation of an interaction's prompt to the interactions recorded before it."""

    ROOT = "root"
    """No recorded interaction is a prefix of the request's messages."""
    EXACT = "exact"
    """The prompt begins with the ids of the parent's prompt and output."""
    BRANCH = "branch"
    """A parent's messages match, but its ids could not be continued: the prompt was rendered
    anew."""


@dataclass(slots=True)
class Interaction:
    """One recorded model call, stored as its difference to its parent.

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
    """The tools of a root; those of an exact child are its root's."""
    continuation: Continuation = Continuation.ROOT
    branch_reason: str | None = None
    """A :data:`BranchReason`, for a branch, and for a root that is not its session's first."""
    untrainable_reason: str | None = None
    reward: float | None = None
    """The interaction's own reward, before rewards are propagated through the tree."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the request that the run overrode, or only recorded."""
    created_at: float = 0.0

    def __post_init__(self) -> None:
        n = len(self.output_ids)
        if not n == len(self.output_logprobs) == len(self.output_versions):
            raise ValueError(f"interaction {self.id}: one logprob and one version per output token")

    @property
    def trainable(self) -> bool:
        """True if its tokens may enter the loss, all but the bound ones; otherwise
        ``untrainable_reason`` has the reason."""
        return self.untrainable_reason is None

    @property
    def cut(self) -> bool:
        """True if the limit of tokens cut its output off."""
        return self.finish_reason == "length"

    @property
    def role(self) -> str:
        """The agent of its session that made the call, by its name; "" for one without a name."""
        role: str = self.request.get("role", "")
        return role

    def loss_mask(self) -> npt.NDArray[np.int32]:
        """Return 1 for each output token that may enter the loss, [output length].

        A token that a grammar decided may not.
        """
        mask = np.full(len(self.output_ids), self.trainable, np.int32)
        for start, end in self.request.get("bound", ()):
            mask[start:end] = 0
        return mask


class SessionMode(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class SessionState(StrEnum):
    OPEN = "open"
    AWAITING_REWARD = "awaiting_reward"
    """The agent has ended, and the reward is outstanding."""
    FINALIZED = "finalized"
    LEASED = "leased"
    TRAINED = "trained"
    REJECTED = "rejected"
    EVALUATED = "evaluated"
    EXPIRED = "expired"
    ABORTED = "aborted"


TERMINAL_STATES = frozenset(SessionState) - {
    SessionState.OPEN,
    SessionState.AWAITING_REWARD,
    SessionState.FINALIZED,
    SessionState.LEASED,
}


@dataclass(slots=True)
class Trajectory:
    """One finalized session as the trainer receives it.

    ``interactions`` are in the order of their creation, parents before children.
    """

    session_id: str
    group_id: str
    """The generation of its group; a group of one has its session's id."""
    interactions: list[Interaction]
    final_reward: float | None = None
    task_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    named_rewards: Mapping[str, float] = field(default_factory=dict)
    """Each named part of the rewards as it was given, summed over the session and its calls. It is
    for statistics: ``final_reward`` and the interactions' rewards have it, weighted."""


@dataclass(slots=True)
class SampledSession:
    """One session of a workflow in this process: rows instead of a :class:`Trajectory`'s tree.

    The ``rewards`` of its rows are final: they have been propagated already.
    """

    session_id: str
    group_id: str
    """The group that all runs of one item of the dataset share."""
    rows: list[Row]
    temperatures: list[float | None]
    """The sampling temperature of each row; None: the run's ``sampling.temperature``."""
    task_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    roles: list[str] = field(default_factory=list)
    """The role of each row's call, "" without a name; empty: none has one."""

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.temperatures):
            raise ValueError(f"session {self.session_id}: one temperature per row, or None")
        if self.roles and len(self.roles) != len(self.rows):
            raise ValueError(f"session {self.session_id}: one role per row, or none at all")
