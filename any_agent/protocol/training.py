"""The bodies of the `/rl` routes for capacity, leases, weight versions and the run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from any_agent.protocol.rl import MAX_COUNT, MAX_NAMED, StrictBody

MAX_PATH = 4096  # characters of a folder's path, as the operating system takes at most


class SetCapacity(StrictBody):
    limit: int = Field(ge=0, le=MAX_COUNT)
    """The total of train sessions that this rank may ever admit."""
    ttl: float = Field(gt=0, le=3600)
    """Seconds after which the limit ends unless it is set again."""
    owner: str = Field(max_length=64)
    """The present start of the trainer; leases of an earlier one are taken back."""
    held: list[str] = Field(default_factory=list, max_length=MAX_NAMED)
    """Sessions whose leases are renewed. A lease whose reply was lost is not among them, and its
    session is soon leased again."""
    number: int = Field(0, ge=0)
    """The number of the owner's message: one that arrives after a later one changes nothing."""


class Unfilled(BaseModel):
    """A group that has begun and keeps slots for its missing members."""

    group_id: str
    size: int
    members: int
    """The number of its sessions."""
    closes_in: float
    """Seconds until it closes with its present members."""


class Capacity(BaseModel):
    admitted: int
    """Train sessions ever admitted, including the reservations of open groups."""
    reserved: int
    """Slots of sessions that are not open yet: being opened, or missing members of open groups."""
    waiting: int
    running: int
    """Open train sessions, except those on grants, which `buffered` leaves out, too."""
    buffered: int
    """Sessions that are finalized or leased, and neither trained nor rejected."""
    limit: int
    queue: list[int] = Field(default_factory=list)
    """The slots that each waiting open needs (all slots of a group), in their order, up to a limit;
    then those of opens that were refused a moment ago and will be repeated."""
    unfilled: list[Unfilled] = Field(default_factory=list)
    """Some of the groups that wait for members, in the order in which they close."""
    grants: int = 0
    """Slots of `/grant_capacity` without a session so far. They come on top: no slot of the trainer
    is reserved for them."""


class Lease(StrictBody):
    owner: str = Field(max_length=64)
    wait: float = Field(30.0, ge=0, le=300)
    max_groups: int = Field(default=1, ge=1, le=1024)
    session_ids: list[str] | None = Field(default=None, max_length=1024)
    """Lease only these sessions, of any group."""
    replay: bool = False
    """True to lease also sessions that a step has consumed (with `session_ids`), for a resume."""


class Rejection(StrictBody):
    session_id: str
    reason: str = Field(max_length=200)


class Ack(StrictBody):
    owner: str = Field(max_length=64)
    trained: list[str] = Field(default_factory=list, max_length=MAX_NAMED)
    rejected: list[Rejection] = Field(default_factory=list, max_length=MAX_NAMED)
    step: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """The optimizer step that consumed them. Sessions that were trained without one are kept for
    good, as no rank can know whether a resume needs them."""

    @model_validator(mode="after")
    def _check_disjoint(self) -> Self:
        if both := {r.session_id for r in self.rejected}.intersection(self.trained):
            raise ValueError(f"{min(both)[:80]!r} is in both trained and rejected")
        return self


class Acked(BaseModel):
    acked: int


class ExportTrajectories(StrictBody):
    session_ids: list[str] = Field(min_length=1, max_length=1024)
    discount: float = Field(1.0, ge=0, le=1)
    style: Literal["individual", "concat"] = "individual"


class Pause(StrictBody):
    ttl: float = Field(120.0, gt=0, le=3600)
    """Seconds after which the engine resumes by itself, if the trainer has died."""


class PublishedVersion(StrictBody):
    version: int = Field(ge=0, le=MAX_COUNT)
    path: str = Field(max_length=MAX_PATH)
    step: int = Field(ge=0, le=MAX_COUNT)
    """The optimizer steps that led to these weights."""


class VersionInfo(BaseModel):
    version: int
    step: int


class SetRun(StrictBody):
    state: Literal["training", "finished", "serving"]
    step: int = Field(0, ge=0, le=MAX_COUNT)
    checkpoint: str | None = Field(default=None, max_length=MAX_PATH)
    oldest_step: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """The step of the oldest retained checkpoint: sessions of later steps are kept for a resume.
    None: all sessions are kept."""


class RunInfo(BaseModel):
    experiment: str
    trial: str
    user: str
    model: str
    state: Literal["training", "finished", "serving"]
    version: int
    step: int
    checkpoint: str | None
    """The newest checkpoint, to be loaded for inference; of `any-agent cloud` its name alone."""
