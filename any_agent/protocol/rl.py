"""The bodies of the `/rl` routes, shared by the proxy, the trainer and the SDK."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

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
"""Sessions that one message of the trainer may name: many times what can be buffered."""
AFTER_HEADER = "x-any-agent-after"
"""Where the next page of a list begins; not there on the last one."""
MAX_COUNT = 2**31 - 1
"""Of versions, which every token carries in 32 bits, of steps and of slots."""
UNREACHABLE_HEADER = "x-any-agent-unreachable"
"""The ranks that are missing in a list of all of them."""
EPOCH_HEADER = "x-any-agent-epoch"
"""The number of the trainer's start. A rank that has heard of a later start refuses earlier ones;
requests without it are people's."""
GRANT_ONLY_HEADER = "x-any-agent-grant-only"
"""With it an AReaL's open takes a slot of `/grant_capacity` or none: a router asks the ranks so,
one after the other. No part of the body, so that the request stays the same for its
Idempotency-Key."""
API_HEADER = "x-any-agent-api"
"""In every answer of a `/rl` route: the version of these bodies."""
API_VERSION = "1"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME_PATTERN}$")]


MAX_REWARD = 1e6
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
    """A finite number, or several by name; ValueError."""
    if not isinstance(value, dict):
        return _number(value)
    if not 1 <= len(value) <= _MAX_NAMED_REWARDS:
        raise ValueError(f"give 1 to {_MAX_NAMED_REWARDS} rewards by name")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(f"{str(name)[:80]!r} is no name for a reward: use {NAME_PATTERN}")
    return {name: _number(each) for name, each in value.items()}


def _reward_or_none(value: Any) -> float | dict[str, float] | None:
    return None if value is None else as_reward(value)


_Number = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
# One function and no union of types: an error names the field alone, not what was tried for it.
RewardValue = Annotated[
    float | dict[str, float] | None,
    PlainValidator(
        _reward_or_none,
        json_schema_input_type=_Number | dict[Name, _Number] | None,
    ),
]
"""A finite number, several by name, or None."""


def _storable(value: dict[str, Any]) -> dict[str, Any]:
    """What the journal and the trainer's wire can carry, so that it fails here or never."""
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


class _Body(BaseModel):
    # A text is no number and a number is neither true nor false.
    model_config = ConfigDict(extra="forbid", strict=True)


class StartSession(_Body):
    task_id: Name | None = None
    group_id: Name | None = None
    group_size: int | None = Field(None, ge=1)
    mode: Literal["train", "eval"] = "train"
    metadata: Metadata = Field(default_factory=dict)
    ttl: float | None = Field(None, gt=0)
    version: Annotated[int, Field(ge=0)] | Literal["current"] | None = None
    """Of an eval session: every token is of this weight version, or its call is refused."""
    wait: float = Field(0.0, ge=0)
    """Seconds to wait for a free slot before 429."""
    api_key: str | None = None
    """An earlier session's key: its lane's next session opens under the same key."""

    @model_validator(mode="after")
    def _pinned_for_eval(self) -> Self:
        if self.version is not None and self.mode != "eval":
            raise ValueError("version pins an eval session; training goes on in between: mode=eval")
        return self


class StartByQuery(StartSession):
    """As text, since everything in a URL is."""

    model_config = ConfigDict(strict=False)


class SessionStarted(BaseModel):
    session_id: str
    api_key: str = Field(repr=False)
    base_url: str
    """What an OpenAI client takes as its base URL."""
    mode: Literal["train", "eval"]
    version: int
    """The weight version that the engine serves now."""
    group_id: str | None
    task_id: str | None
    expires_in: float
    """Seconds until its ttl runs out."""
    idle_in: float | None = None
    """Seconds until it expires if nothing happens in it."""


class SetReward(_Body):
    """Either `reward`, of one completion, or `final_reward`, of the whole session."""

    reward: RewardValue = None
    final_reward: RewardValue = None
    completion_id: str | None = None
    """The completion to reward; default: the last one."""
    interaction_id: str | None = None
    """The same, under our own name for it."""
    name: Name | None = None
    """The name of a reward that is a number."""
    session_id: str | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.reward is None) == (self.final_reward is None):
            raise ValueError("give either reward or final_reward")
        if self.final_reward is not None and (self.completion_id or self.interaction_id):
            raise ValueError("final_reward is of the session: give no completion_id with it")
        if self.completion_id and self.interaction_id not in (None, self.completion_id):
            raise ValueError("completion_id and interaction_id name different completions")
        named = self.reward if self.final_reward is None else self.final_reward
        if self.name is not None and not isinstance(named, float):
            raise ValueError("name is for a reward that is a number")
        return self


class RewardSet(BaseModel):
    status: Literal["success"] = "success"
    session_id: str
    interaction_id: str | None
    """None: it is the session's final reward."""
    reward: float
    """What its named and unnamed rewards add up to now."""


class Finalize(_Body):
    final_reward: RewardValue = None
    await_reward: bool = False
    """Take no more calls, and rewards until the deadline; `finalize` again ends it earlier."""
    deadline: float | None = Field(default=None, gt=0)
    """Seconds to await rewards for; default and most: `sessions.reward_deadline`."""
    session_id: str | None = None

    @model_validator(mode="after")
    def _deadline_of_something(self) -> Self:
        if self.deadline is not None and not self.await_reward:
            raise ValueError("deadline needs await_reward: true")
        return self


class Abort(_Body):
    reason: str = Field("aborted by the caller", max_length=200)
    keep_place: bool = False
    """Its group keeps its place for another session, until the group's time is over. Without this
    the group closes without it."""


class Veto(_Body):
    reason: str = Field("by its owner", max_length=200)


class Heartbeat(BaseModel):
    session_id: str
    expires_in: float
    """Seconds until its ttl runs out; a heartbeat does not move that."""
    idle_in: float
    """Seconds until it expires if nothing happens."""


class SessionInfo(BaseModel):
    session_id: str
    state: str
    reason: str | None
    """Why it is in this state, where that is not plain."""
    mode: Literal["train", "eval"]
    task_id: str | None
    group_id: str | None
    tenant: str | None
    opened_by: str | None
    """Whose key opened it."""
    content: Literal["stored", "archived", "deleted"]
    """Where its texts and tokens are."""
    interactions: int
    rewards: dict[str, float]
    """Each rewarded interaction's own reward."""
    final_reward: float | None
    rewarded: bool | None
    """Whether it has any reward; training counts none as 0. None: not known any more, as its
    content is not here."""
    first_version: int | None
    """The oldest weight version of its tokens."""
    last_version: int | None
    """The newest one."""
    pinned_version: int | None
    """The only one that its tokens may have."""
    step: int | None
    """The optimizer step that consumed it."""
    created_at: float
    """Seconds since the epoch, as `ended_at`."""
    ended_at: float | None
    expires_in: float | None
    """Seconds until its ttl runs out, while it is open."""
    idle_in: float | None
    """Seconds until it expires if nothing happens, while it is open."""
    awaits_in: float | None
    """Seconds until it stops waiting for its reward, while it does."""


class SessionFinalized(SessionInfo):
    """The session as it is now; the same again for who finalizes it once more."""

    status: Literal["success"] = "success"


class RewardEntry(BaseModel):
    interaction_id: str | None
    """None: the session's final reward."""
    name: str | None
    value: float
    by: str
    """Whose key gave it, or what in the service did."""
    at: float
    """Seconds since the epoch."""


class SessionDetails(SessionInfo):
    reward_history: list[RewardEntry]
    """Every reward as it was given, oldest first; the last ones, if they are many."""
    rewards_given: int
    """How many there were in all."""


class InteractionContent(BaseModel):
    id: str
    parent_id: str | None
    message_delta: list[dict[str, Any]]
    """What it adds to its parent's messages and answer."""
    output_message: dict[str, Any]
    finish_reason: str


class SessionContent(BaseModel):
    """What was said in a session: its calls of the policy, oldest first."""

    session_id: str
    mode: Literal["train", "eval"]
    task_id: str | None
    metadata: dict[str, Any]
    interactions: list[InteractionContent]

    def graded(self) -> dict[str, Any]:
        """As a grader (`sessions.grader`) is given it: each interaction with its whole talk."""
        talks: dict[str, list[dict[str, Any]]] = {}
        interactions = []
        for one in self.interactions:
            before = talks[one.parent_id] if one.parent_id is not None else []
            messages = [*before, *one.message_delta]
            talks[one.id] = [*messages, one.output_message]
            interactions.append(
                {
                    "id": one.id,
                    "parent_id": one.parent_id,
                    "messages": messages,
                    "output_message": one.output_message,
                    "finish_reason": one.finish_reason,
                }
            )
        return self.model_dump(exclude={"interactions"}) | {"interactions": interactions}


def read_places(text: str) -> dict[int, int]:
    """Where a list of sessions goes on: each rank's lowest number so far; ValueError."""
    found = {}
    for part in filter(None, text.split(",")):
        rank, colon, number = part.partition(":")
        # No store counts further than 64 bits.
        if not (colon and rank.isdecimal() and number.isdecimal() and len(part) < 20):
            raise ValueError("pass what the header x-any-agent-after of the page before said")
        found[int(rank)] = int(number)
    return found


def write_places(places: Mapping[int, int]) -> str:
    """The inverse of :func:`read_places`."""
    return ",".join(f"{rank}:{number}" for rank, number in sorted(places.items()))


# By name: the arrays beside the states in any_agent.types would be a burden to light clients.
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


class ListSessions(_Body):
    """Which sessions; without a filter all of them. In a URL."""

    model_config = ConfigDict(strict=False)

    state: State | None = None
    task_id: str | None = Field(default=None, max_length=64)
    group_id: str | None = Field(default=None, max_length=64)
    tenant: str | None = Field(default=None, max_length=64)
    limit: int = Field(default=100, ge=1, le=1000)
    after: str = Field(default="", max_length=16_384)
    """Where the page before ended: its header `x-any-agent-after`."""

    @field_validator("after")
    @classmethod
    def _readable(cls, after: str) -> str:
        read_places(after)
        return after

    @property
    def places(self) -> dict[int, int]:
        return read_places(self.after)


class SessionLine(BaseModel):
    """One session in a list."""

    session_id: str
    number: int
    """Its place in the order of creation on its rank."""
    state: str
    mode: Literal["train", "eval"]
    task_id: str | None
    group_id: str | None
    tenant: str | None
    interactions: int
    """Those that the journal holds."""
    rewards_given: int | None
    """How many there were in all, revisions too; None: they are archived."""
    final_reward: float | None
    reason: str | None
    step: int | None
    """The optimizer step that consumed it."""
    content: str
    """Where its interactions are: stored, archived or deleted."""
    created_at: float
    ended_at: float | None


class SetCapacity(_Body):
    limit: int = Field(ge=0, le=MAX_COUNT)
    """Train sessions ever admitted on this rank."""
    ttl: float = Field(gt=0, le=3600)
    """Seconds after which the limit lapses unless it is set again."""
    owner: str = Field(max_length=64)
    """The trainer's incarnation; leases of an earlier one are taken back."""
    held: list[str] = Field(default_factory=list, max_length=MAX_NAMED)
    """Sessions whose leases are renewed. A lease whose answer was lost is not among them, and is
    soon handed out again."""
    number: int = Field(0, ge=0)
    """Counts the owner's messages: one that arrives after a later one changes nothing."""


class Unfilled(BaseModel):
    """A group that is begun, and keeps slots for members that are not there yet."""

    group_id: str
    size: int
    members: int
    """Sessions that are in it."""
    closes_in: float
    """Seconds until it closes with those that it has."""


class Capacity(BaseModel):
    admitted: int
    """Train sessions ever admitted, reservations of open groups counted in."""
    reserved: int
    """Slots taken by sessions that are not open yet: being opened, or members of open groups."""
    waiting: int
    running: int
    """Open train sessions; like the buffered ones without those that were opened on grants."""
    buffered: int
    """Finalized or leased, neither trained nor rejected."""
    limit: int
    queue: list[int] = Field(default_factory=list)
    """Slots that each open (a group: all of it) waits for, in their order; the first ones. Then
    what was refused a moment ago and will be asked for again."""
    unfilled: list[Unfilled] = Field(default_factory=list)
    """The groups that others' sessions wait for: some of them, those first that close first."""
    grants: int = 0
    """Slots of `/grant_capacity` that no session was opened on yet. They are beside the others:
    none of the trainer's is held for them."""


class Lease(_Body):
    owner: str = Field(max_length=64)
    wait: float = Field(30.0, ge=0, le=300)
    max_groups: int = Field(default=1, ge=1, le=1024)
    session_ids: list[str] | None = Field(default=None, max_length=1024)
    """Lease just these sessions, whatever their group."""
    replay: bool = False
    """With `session_ids`: also those that a step took already, for a resume from before it."""


class Rejection(_Body):
    session_id: str
    reason: str = Field(max_length=200)


class Ack(_Body):
    owner: str = Field(max_length=64)
    trained: list[str] = Field(default_factory=list, max_length=MAX_NAMED)
    rejected: list[Rejection] = Field(default_factory=list, max_length=MAX_NAMED)
    step: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """The optimizer step that consumed them. What was trained without one is kept for good: no rank
    can know whether a resume will want it."""

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if both := {r.session_id for r in self.rejected}.intersection(self.trained):
            raise ValueError(f"{min(both)[:80]!r} is said to be trained on and to be rejected")
        return self


class Acked(BaseModel):
    acked: int


class ExportTrajectories(_Body):
    session_ids: list[str] = Field(min_length=1, max_length=1024)
    discount: float = Field(1.0, ge=0, le=1)
    style: Literal["individual", "concat"] = "individual"


class Pause(_Body):
    ttl: float = Field(120.0, gt=0, le=3600)
    """Seconds after which the engine goes on by itself, if the trainer has died."""


class PublishedVersion(_Body):
    version: int = Field(ge=0, le=MAX_COUNT)
    path: str
    step: int = Field(ge=0, le=MAX_COUNT)
    """Optimizer steps behind these weights."""


class VersionInfo(BaseModel):
    version: int
    step: int


class SetRun(_Body):
    state: Literal["training", "finished", "serving"]
    step: int = Field(0, ge=0, le=MAX_COUNT)
    checkpoint: str | None = None
    oldest_step: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """The step of the oldest retained checkpoint: sessions of later steps are kept for a resume.
    None: all of them are."""


class RunInfo(BaseModel):
    experiment: str
    trial: str
    user: str
    model: str
    state: Literal["training", "finished", "serving"]
    version: int
    step: int
    checkpoint: str | None
    """The newest checkpoint: what to load for inference."""
