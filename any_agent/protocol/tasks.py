"""The body of `GET /rl/v1/tasks/next`."""

from __future__ import annotations

from itertools import takewhile
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from any_agent.protocol.rl import Name, StrictBody

MAX_TASKS = 32
"""The most tasks that one request names."""
MOST_RESTS = 3
"""The groups in a row that taught nothing after which a task is not drawn less any more."""


class AskNextTask(StrictBody):
    """The tasks to choose from, in a URL: `task_id` once for each."""

    model_config = ConfigDict(strict=False)

    task_id: list[Name] = Field(default=[], max_length=MAX_TASKS)
    """Without any: the tasks of the latest sessions."""


class JudgedGroup(BaseModel):
    """A group of which the trainer has decided."""

    at: float
    """The opening of its last session, in seconds since the epoch."""
    taught: bool
    """False if its sessions scored alike, or none could be trained on."""


class TaskFacts(BaseModel):
    """The facts about a task that its latest train sessions tell."""

    task_id: str
    sessions: int
    """Its latest sessions that were looked at."""
    rewards: int
    """The number of these whose reward is known."""
    mean_reward: float | None
    """Their mean reward: with rewards of 0 and 1 the success rate. None without any."""
    latest_groups: list[JudgedGroup]
    """Its last judged groups, the newest first, three at most."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Literal["unknown", "teaches", "taught_nothing"]:
        """By its last judged group; `unknown` without one."""
        if not self.latest_groups:
            return "unknown"
        return "teaches" if self.latest_groups[0].taught else "taught_nothing"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def weight(self) -> float:
        """Its weight in the draw: halved by each of its last groups in a row that taught
        nothing."""
        dull = takewhile(lambda group: not group.taught, self.latest_groups)
        return 0.5 ** min(sum(1 for _ in dull), MOST_RESTS)


class NextTask(TaskFacts):
    """The task to run next, with what is known of it and of the others."""

    candidates: list[TaskFacts]
    """All tasks that it was drawn from, with their weights."""
