"""Settings of sessions: their lifetime, their groups, their rewards."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from any_agent.config.base import NAME_PATTERN, Section

MAX_REWARD_WEIGHT = 1000.0


class SessionConfig(Section):
    ttl: float = Field(3600.0, gt=0)
    """Seconds that a session may stay open in any case."""
    idle_timeout: float = Field(1800.0, gt=0)
    """Seconds without a call, a reward or a heartbeat after which an open session expires. A
    running call counts, however long it takes."""
    max_wait: float = Field(300.0, ge=0)
    """The most seconds that `start_session` may wait for a slot."""
    max_waiting: int = Field(4096, ge=1)
    """Openings that may wait at once; further ones get 429."""
    group_size: int = Field(8, ge=1)
    """Sessions of one task that share a baseline, unless an opening gives another size."""
    group_timeout: float = Field(1800.0, gt=0)
    """Seconds after which a group closes with the sessions that it has."""
    min_group_size: int = Field(2, ge=1)
    """A group that closes with fewer finalized sessions is rejected, because a baseline needs
    several. No group needs more than the size with which it was opened."""
    max_open: int = Field(20_000, ge=1)
    """Sessions that each rank keeps open at once, including those that wait for a reward; further
    openings get 429."""
    hot_bytes: int = Field(128 * 2**20, ge=0)
    """The approximate size, in bytes, of the records of live sessions that each rank keeps in
    memory. The least recently used records are in the journal only, and are read again on use."""
    require_reward: bool = True
    """Refuse to finalize a train session without a reward."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """The weights of rewards by name, e.g. `{correct: 1, format: 0.2}`; other names are then
    refused. Empty: every name is accepted and has the weight 1."""
    reward_deadline: float = Field(3600.0, gt=0)
    """The most seconds, and the default, that `finalize` with `await_reward` waits for rewards."""
    late_reward: Literal["reject", "zero", "grade"] = "reject"
    """The treatment of a session that has no reward at its deadline: it is rejected and never
    trained on, gets the reward 0, or gets the grade of `sessions.grader`."""
    rewards: Literal["agent", "judge", "both"] | None = None
    """The source of rewards of sessions whose opening names none: `agent` (the session's own key
    may set them), `judge` (it may not) or `both`. null: `judge` where the service's own grader
    rewards (`late_reward: grade`, and the sessions of `implicit`), else `agent`. Agents that a
    workflow runs on a dataset return their rewards, so theirs are always `agent`. What is set here
    binds tenants: an opening with a tenant's key may name a stricter source, never a looser one.
    With `judge` and the service's own grader, a tenant's key cannot reward its sessions, either."""
    store_content: bool = True
    """Store the texts of sessions. If false, messages, tools and recorded parameters are dropped
    when a call is answered, in memory and before anything is written; token ids, log-probabilities,
    rewards and the caller's metadata stay, so sessions continue exactly and can be trained on."""
    grader: str = ""
    """For `late_reward: grade` and `sessions.implicit`: `module.function`, which takes a session as
    a dictionary and returns a number, or several by name; or, by the ids of calls, those of its
    calls. It runs in a process of its own."""
    grader_timeout: float = Field(60.0, gt=0)
    """Seconds that one grade may take; then its process is killed, and the session is rejected."""
    implicit: bool = False
    """Open sessions for model calls that name none and come with a tenant's key (or, where no key
    is required, with any): each conversation becomes a session, which `sessions.grader` rewards.
    Where nothing is trained these are eval sessions."""
    implicit_idle_timeout: float = Field(300.0, gt=0)
    """Seconds without a call after which such a session ends and is graded: set it above the
    longest pause of its agent between two calls."""
    implicit_wait: float = Field(60.0, ge=0)
    """Seconds that the first call of a conversation waits for a slot before it gets 429; at most
    `sessions.max_wait`."""
    implicit_group_size: int | None = Field(None, ge=1)
    """Number of conversations with the same beginning that share a baseline; None:
    `sessions.group_size`. Set 1 if no task is tried twice."""
    keep_hours: float = Field(24.0, ge=0)
    """Hours after its end that a session's content stays in the journal; content that no checkpoint
    needs then moves to a compressed file of the run's `archive` folder. `any-agent export` reads
    both."""
    archive_bytes: int | None = Field(None, ge=0)
    """The most bytes of the run's `archive` folder: beyond them the oldest files are removed, and
    the log says so. Each rank has an equal share. None: a quarter of the file system."""

    @field_validator("reward_weights")
    @classmethod
    def _usable_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            if not re.fullmatch(NAME_PATTERN, name):
                raise ValueError(f"{name!r} is not a valid name for a reward")
            if not abs(weight) <= MAX_REWARD_WEIGHT:
                raise ValueError(f"the weight of {name} must lie within +-{MAX_REWARD_WEIGHT:g}")
        return weights

    @model_validator(mode="after")
    def _grader_for_grades(self) -> Self:
        named = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", self.grader)
        if self.grader and not named:
            raise ValueError("sessions.grader must be module.function")
        if self.late_reward == "grade" and not self.store_content:
            raise ValueError("sessions.late_reward=grade needs sessions.store_content=true")
        if self.late_reward == "grade" and not self.grader:
            raise ValueError("sessions.late_reward=grade needs sessions.grader=module.function")
        if self.implicit and not (self.grader and self.store_content):
            raise ValueError(
                "sessions.implicit=true needs sessions.grader=module.function and "
                "sessions.store_content=true, because only the grader rewards such sessions"
            )
        return self
