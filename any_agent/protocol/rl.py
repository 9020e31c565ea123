"""The bodies of the `/rl` routes for sessions, shared by the proxy, the trainer and the SDK."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    field_validator,
    model_validator,
)
from pydantic.types import StringConstraints

from any_agent.config import NAME_PATTERN

MAX_METADATA_BYTES = 65_536
MAX_METADATA_DEPTH = 32
MAX_NAMED = 131_072
"""The most sessions in one message of the trainer: many times the number that can be buffered."""
AFTER_HEADER = "x-any-agent-after"
"""Response header: the place where the next page of a list begins; absent on the last page."""
_PLACES = "^([0-9]{1,4}:[0-9]{1,15}(,[0-9]{1,4}:[0-9]{1,15})*)?$"
"""The places at which a list of several ranks goes on."""
MAX_COUNT = 2**31 - 1
"""The largest version, step and number of slots: every token carries its version in 32 bits."""
UNREACHABLE_HEADER = "x-any-agent-unreachable"
"""Response header: the ranks whose part of a list is missing."""
EPOCH_HEADER = "x-any-agent-epoch"
"""Request header: the number of the trainer's start. A rank that knows of a later start refuses
earlier ones; requests without it come from people."""
GRANT_ONLY_HEADER = "x-any-agent-grant-only"
"""Request header: an AReaL open takes a slot of `/grant_capacity` or none; a router asks the ranks
so in turn. It is no part of the body, which must stay the same for its Idempotency-Key."""
IDEMPOTENCY_KEY = "Idempotency-Key"
"""The header with which a repeated request has its first answer again."""
FLEET_HEADER = "x-any-agent-fleet"
"""Request header: the number of the fleet by which a router chose a rank for an open. With `member`
behind it, the rank may only add a member to a group that it has."""
API_HEADER = "x-any-agent-api"  # response header of every `/rl` route: the version of these bodies
API_VERSION = "1"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]


MAX_REWARD = 1e6
MAX_FEEDBACK_TEXT = 4096
"""The most characters of one text of feedback."""
_MAX_NAMED_REWARDS = 32


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a reward must be a number, or an object of numbers by name")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a reward must be a finite number")
    if abs(value) > MAX_REWARD:
        raise ValueError(f"a reward must lie between -{MAX_REWARD:g} and {MAX_REWARD:g}")
    return float(value)


def as_reward(value: Any) -> float | dict[str, float]:
    """Return a finite number, or several by name; ValueError for any other value."""
    if not isinstance(value, dict):
        return _number(value)
    if not 1 <= len(value) <= _MAX_NAMED_REWARDS:
        raise ValueError(f"give 1 to {_MAX_NAMED_REWARDS} rewards by name")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
            shown = repr(str(name)[:80])
            raise ValueError(f"{shown} is not a valid name for a reward: use {NAME_PATTERN}")
    return {name: _number(each) for name, each in value.items()}


_Number = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
_NamedNumbers = Annotated[
    dict[Name, _Number],
    Field(
        min_length=1,
        max_length=_MAX_NAMED_REWARDS,
        json_schema_extra={"additionalProperties": False},
    ),
]
# One function instead of a union: an error then names the field, not every member of the union.
RewardValue = Annotated[
    float | dict[str, float] | None,
    PlainValidator(
        lambda value: None if value is None else as_reward(value),
        json_schema_input_type=_Number | _NamedNumbers | None,
    ),
]
"""A finite number, several by name, or None."""


def _storable(value: dict[str, Any]) -> dict[str, Any]:
    """Return metadata that the journal and the trainer's wire can carry; ValueError otherwise."""
    try:
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except (ValueError, RecursionError):
        raise ValueError("metadata must be plain JSON: finite numbers, valid text") from None
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"metadata is {size} bytes long; at most {MAX_METADATA_BYTES} are kept")
    todo: list[tuple[Any, int]] = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > MAX_METADATA_DEPTH:
            raise ValueError(f"metadata is nested deeper than {MAX_METADATA_DEPTH} levels")
        if isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise ValueError("metadata holds an integer of more than 64 bits; write it as text")
        if isinstance(item, dict | list):
            below = item.values() if isinstance(item, dict) else item
            todo += [(each, depth + 1) for each in below]
    return value


Metadata = Annotated[dict[str, Any], AfterValidator(_storable)]


Rewards: TypeAlias = Literal["agent", "judge", "both"]
"""The callers that may reward a session: its own key, only others, or both."""


class StrictBody(BaseModel):
    """A request's body; no text passes for a number, and no number for a bool."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StartSession(StrictBody):
    task_id: Name | None = None
    group_id: Name | None = None
    group_size: int | None = Field(None, ge=1)
    mode: Literal["train", "eval"] = "train"
    metadata: Metadata = Field(default_factory=dict)
    ttl: float | None = Field(None, gt=0)
    rewards: Rewards | None = None
    """The source of its rewards; default: `sessions.rewards`, and with `api_key` that of the key's
    session before."""
    version: Annotated[int, Field(ge=0)] | Literal["current"] | None = None
    """The weight version of every token of an eval session; other calls are refused."""
    wait: float = Field(0.0, ge=0)
    """Seconds to wait for a free slot before 429."""
    api_key: str | None = None
    """An earlier session's key: the new session opens in the same lane, under the same key."""

    @model_validator(mode="after")
    def _check_version(self) -> Self:
        if self.version is not None and self.mode != "eval":
            raise ValueError("version pins eval sessions only: set mode=eval")
        return self


class StartByQuery(StartSession):
    """The same fields in a URL, where all values are text."""

    model_config = ConfigDict(strict=False)


class SessionStarted(BaseModel):
    session_id: str
    api_key: str = Field(repr=False)
    base_url: str
    """The base URL for an OpenAI client."""
    mode: Literal["train", "eval"]
    version: int
    """The weight version that the engine serves now."""
    group_id: str | None
    task_id: str | None
    expires_in: float
    """Seconds until its ttl is over."""
    idle_in: float | None = None
    """Seconds until it expires if nothing happens in it."""
    judge_key: str | None = Field(None, repr=False)
    """The key that may reward and end the session, and nothing else; None where `rewards` is
    `agent`."""

    @property
    def end_key(self) -> str:
        """The key for its rewards and its end."""
        return self.judge_key or self.api_key


class SetReward(StrictBody):
    """Either `reward`, of one completion, or `final_reward`, of the whole session."""

    reward: RewardValue = None
    final_reward: RewardValue = None
    completion_id: str | None = None
    """The completion to reward; default: the last one."""
    interaction_id: str | None = None
    """The same under any-agent's own name."""
    name: Name | None = None
    """The name of a reward that is a number."""
    session_id: str | None = None

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if (self.reward is None) == (self.final_reward is None):
            raise ValueError("give either reward or final_reward")
        if self.final_reward is not None and (self.completion_id or self.interaction_id):
            raise ValueError("final_reward is for the whole session: give no completion_id with it")
        if self.completion_id and self.interaction_id not in (None, self.completion_id):
            raise ValueError("completion_id and interaction_id name different completions")
        named = self.reward if self.final_reward is None else self.final_reward
        if self.name is not None and not isinstance(named, float):
            raise ValueError("name is for a reward that is a number")
        return self


Score = Annotated[
    float | None,
    PlainValidator(
        lambda value: None if value is None else _number(value),
        json_schema_input_type=_Number | None,
    ),
]


class Feedback(StrictBody):
    """A user's opinion of one completion, or without `completion_id` of the whole session."""

    thumbs: Literal["up", "down"] | None = None
    """`up` is 1, and `down` is -1: no feedback adds 0."""
    score: Score = None
    """A number instead."""
    text: Annotated[str, StringConstraints(min_length=1, max_length=MAX_FEEDBACK_TEXT)] | None = (
        None
    )
    """The user's words, which are kept with the session; alone they set no reward."""
    completion_id: str | None = None
    """The id of the answer; it also finds the session."""
    session_id: str | None = None

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        if self.thumbs is not None and self.score is not None:
            raise ValueError("give either thumbs or score, not both")
        if self.value is None and self.text is None:
            raise ValueError("give thumbs or a score, text, or both")
        return self

    @property
    def value(self) -> float | None:
        """The reward; None for words alone."""
        if self.thumbs is None:
            return self.score
        return 1.0 if self.thumbs == "up" else -1.0


class RewardSet(BaseModel):
    status: Literal["success"] = "success"
    session_id: str
    interaction_id: str | None
    """The rewarded interaction; None for the session's final reward."""
    reward: float | None
    """The present sum of its named and unnamed rewards; None after words alone where there is
    none."""


class FeedbackGiven(RewardSet):
    text_stored: bool
    """True if the request's text is kept; a run with `sessions.store_content: false` drops it."""


class Finalize(StrictBody):
    final_reward: RewardValue = None
    await_reward: bool = False
    """Refuse further calls and accept rewards until the deadline; `finalize` again ends it
    earlier."""
    deadline: float | None = Field(default=None, gt=0)
    """Seconds to await rewards; default and maximum: `sessions.reward_deadline`."""
    session_id: str | None = None

    @model_validator(mode="after")
    def _check_deadline(self) -> Self:
        if self.deadline is not None and not self.await_reward:
            raise ValueError("deadline needs await_reward: true")
        return self


class Abort(StrictBody):
    reason: str = Field("aborted by the caller", max_length=200)
    keep_place: bool = False
    """The group keeps the session's place for another one until the group's time is over; otherwise
    the group closes without it."""


class Veto(StrictBody):
    reason: str = Field("by its owner", max_length=200)


class Heartbeat(BaseModel):
    session_id: str
    expires_in: float
    """Seconds until its ttl is over, which a heartbeat does not change."""
    idle_in: float
    """Seconds until it expires if nothing happens."""


class _Session(BaseModel):
    session_id: str
    state: str
    reason: str | None
    """The reason for this state, where the state does not explain itself."""
    mode: Literal["train", "eval"]
    task_id: str | None
    group_id: str | None
    tenant: str | None
    content: Literal["stored", "archived", "deleted"]
    """The place of its texts and tokens; `deleted`: erased by request, by `any-agent sessions
    prune`, or with the oldest archives (`sessions.archive_bytes`)."""
    interactions: int
    final_reward: float | None
    step: int | None
    """The optimizer step that consumed it."""
    created_at: float
    """Seconds since the epoch, like `ended_at`."""
    ended_at: float | None


class SessionInfo(_Session):
    opened_by: str | None
    """The holder of the key that opened it."""
    rewarded_by: Rewards = "agent"
    """The source of its rewards: its own key (`agent`), others (`judge`), or both."""
    rewards: dict[str, float]
    """Each rewarded interaction's own reward."""
    rewarded: bool | None
    """True if it has any reward; training counts a missing one as 0. None: unknown, as its content
    is archived or deleted."""
    first_version: int | None
    """The oldest weight version of its tokens."""
    last_version: int | None
    """The newest weight version of its tokens."""
    pinned_version: int | None
    """The only weight version that its tokens may have."""
    output_tokens: int | None = None
    """The number of tokens that its calls sampled; None where the content is archived or
    deleted."""
    expires_in: float | None
    """Seconds until the open session's ttl is over; None for a session that has ended."""
    idle_in: float | None
    """Seconds until the open session expires if nothing happens; None for one that has ended."""
    awaits_in: float | None
    """Seconds for which the session still waits for its reward; None if it waits for none."""
    trainable_calls: int | None = None
    """The calls of a train session that can be trained on; None for an eval session, and where the
    content is archived or deleted."""
    untrainable_calls: dict[str, int] = {}
    """The numbers of its other calls by reason, such as `grammar`; `discarded`: another answer to
    the same request was continued."""
    roots: int | None = None
    """The prompts that continue no earlier call's tokens, the first included; 1 is an unbroken
    session. Each begins a conversation that is trained by itself. None where the content is
    archived or deleted."""
    root_reasons: dict[str, int] = {}
    """The numbers of the roots after the first by reason, such as `history_rewritten`."""
    roles: dict[str, int] = {}
    """The numbers of its calls by role, of a session where one is named; "" are the others."""


class SessionFinalized(SessionInfo):
    """The session's state after finalizing it; repeating the request returns the same."""

    status: Literal["success"] = "success"


class RewardEntry(BaseModel):
    interaction_id: str | None
    """The rewarded interaction; None for the session's final reward."""
    name: str | None
    value: float | None
    """None for words alone."""
    by: str
    """The holder of the key, or the part of the service, that set it."""
    at: float
    """Seconds since the epoch."""
    text: str | None = None
    """A user's words with it, which the agent of a session that others reward does not see."""


class SessionDetails(SessionInfo):
    reward_history: list[RewardEntry]
    """All rewards and words as they were given, oldest first; only the last ones if there are
    many."""
    rewards_given: int
    """The total number of rewards that were set."""


class InteractionContent(BaseModel):
    id: str
    parent_id: str | None
    message_delta: list[dict[str, Any]]
    """The messages that follow its parent's messages and answer."""
    output_message: dict[str, Any]
    finish_reason: str
    next_messages: list[list[dict[str, Any]]] = []
    """The messages of users and tools after the answer, for each continuation that differs."""


class FeedbackContent(BaseModel):
    interaction_id: str | None
    """The answer that it is about; None for the whole session."""
    value: float | None
    """The reward; None for words alone."""
    text: str | None
    by: str
    at: float
    """Seconds since the epoch."""


class SessionContent(BaseModel):
    """The messages of a session: its calls of the policy, oldest first."""

    session_id: str
    mode: Literal["train", "eval"]
    task_id: str | None
    metadata: dict[str, Any]
    feedback: list[FeedbackContent] = []
    """All feedback of users, oldest first."""
    interactions: list[InteractionContent]

    def graded(self) -> dict[str, Any]:
        """Return the input of a grader (`sessions.grader`): each interaction with all its
        messages."""
        conversations: dict[str, list[dict[str, Any]]] = {}
        interactions = []
        for one in self.interactions:
            before = conversations[one.parent_id] if one.parent_id is not None else []
            messages = [*before, *one.message_delta]
            conversations[one.id] = [*messages, one.output_message]
            interactions.append(
                {
                    "id": one.id,
                    "parent_id": one.parent_id,
                    "messages": messages,
                    "output_message": one.output_message,
                    "finish_reason": one.finish_reason,
                    "next_messages": one.next_messages,
                }
            )
        return self.model_dump(exclude={"interactions"}) | {"interactions": interactions}


def read_places(text: str) -> dict[int, int]:
    """Parse the place where a list of sessions goes on, each rank's lowest number so far."""
    found = {}
    for part in filter(None, text.split(",")):
        rank, colon, number = part.partition(":")
        # The numbers of a store have at most 64 bits.
        if not (colon and rank.isdecimal() and number.isdecimal() and len(part) < 20):
            raise ValueError("pass the value of the header x-any-agent-after of the previous page")
        found[int(rank)] = int(number)
    return found


def write_places(places: Mapping[int, int]) -> str:
    """Return the text that :func:`read_places` parses."""
    return ",".join(f"{rank}:{number}" for rank, number in sorted(places.items()))


# Written out: any_agent.types, which has the states, imports numpy, and light clients must not.
State = Literal[
    "open",
    "awaiting_reward",
    "finalized",
    "leased",
    "trained",
    "rejected",
    "evaluated",
    "expired",
    "aborted",
]


class ListSessions(StrictBody):
    """Filters of a list of sessions, in a URL; without any, all sessions."""

    model_config = ConfigDict(strict=False)

    state: State | None = None
    task_id: str | None = Field(default=None, max_length=64)
    group_id: str | None = Field(default=None, max_length=64)
    tenant: str | None = Field(default=None, max_length=64)
    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    """The least reward: the sum of the final one and the calls' own, as `reward` is listed;
    sessions without any are left out."""
    max_reward: float | None = Field(default=None, allow_inf_nan=False)
    """The greatest reward; sessions without any are left out."""
    reason: str | None = Field(default=None, max_length=128)
    """A part of the reason, in any case: of an end, such as an error, or of a rejection."""
    created_after: float | None = Field(default=None, allow_inf_nan=False)
    """The earliest opening, in seconds since 1970."""
    created_before: float | None = Field(default=None, allow_inf_nan=False)
    """The time before which they were opened, in seconds since 1970."""
    limit: int = Field(default=100, ge=1, le=1000)
    after: str = Field(default="", max_length=16_384, json_schema_extra={"pattern": _PLACES})
    """The header `x-any-agent-after` of the previous page."""

    @field_validator("after")
    @classmethod
    def _check_after(cls, after: str) -> str:
        read_places(after)
        return after

    @property
    def places(self) -> dict[int, int]:
        return read_places(self.after)


class SessionLine(_Session):
    """One session in a list; its interactions are those in the journal."""

    number: int
    """The session's number in the order of creation on its rank."""
    rewards_given: int | None
    """The number of rewards that were set, with revisions; None: they are archived."""
    reward: float | None = None
    """The sum of its rewards: the final one and its interactions' own. None without any, and where
    those of interactions are archived or deleted and there is no final one."""
