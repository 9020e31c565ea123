"""The tasks of a run's latest train sessions: which teach, and which are alike or never filled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

LATEST = 1000
"""Sessions that are looked at."""
_TOO_SMALL = "group_too_small"
_ALIKE = "zero_variance"
_ORDERS = {
    "hardest": lambda task: (task.mean is None, task.mean or 0.0),
    "improved": lambda task: -(task.change or 0.0),
    "worsened": lambda task: task.change or 0.0,
    "sessions": lambda task: -task.sessions,
    "latest": lambda task: -task.last,
}
ORDERS = tuple(_ORDERS)


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task's sessions among those that were looked at."""

    id: str
    sessions: int
    mean: float | None
    """Mean reward; None if no session has one."""
    change: float | None
    """Mean reward of the later half minus that of the earlier one; None below four rewards."""
    groups: int
    alike: int
    """Groups of several rewarded sessions that scored alike, so that they teach nothing. By their
    rewards, where no step has taken the group yet."""
    unfilled: int
    """Sessions that were rejected because their group lacked members."""
    last: float
    """When its last session was opened."""

    @property
    def verdict(self) -> str:
        """The task's use for training, in a word."""
        if self.unfilled and self.unfilled == self.sessions:
            return "never filled"
        if self.groups and self.alike == self.groups:
            return "all alike"
        return "teaches" if self.groups else ""


def tasks_of(
    sessions: Iterable[Mapping[str, Any]], order: str, *, keeps_alike: bool = False
) -> tuple[Sequence[TaskRow], int, int]:
    """Return the tasks in an order of `ORDERS`, and the number of train sessions with and without a
    task. ``keeps_alike``: steps also take groups that scored alike."""
    by_task: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    without = 0
    for session in sessions:
        if session["mode"] != "train":
            continue
        if session["task_id"] is None:
            without += 1
        else:
            by_task[session["task_id"]].append(session)
    rows = [_row(task, found, keeps_alike) for task, found in by_task.items()]
    known = sum(row.sessions for row in rows)
    return sorted(rows, key=_ORDERS.get(order, _ORDERS["hardest"])), known, without


def _row(task: str, sessions: Sequence[Mapping[str, Any]], keeps_alike: bool) -> TaskRow:
    oldest_first = sorted(sessions, key=lambda session: session["created_at"])
    rewards = [s["reward"] for s in oldest_first if s["reward"] is not None]
    half = len(rewards) // 2
    groups: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for session in oldest_first:
        if session["group_id"] is not None and session["reward"] is not None:
            groups[session["group_id"]].append(session)
    several = [members for members in groups.values() if len(members) > 1]
    return TaskRow(
        id=task,
        sessions=len(sessions),
        mean=mean(rewards) if rewards else None,
        change=mean(rewards[half:]) - mean(rewards[:half]) if half > 1 else None,
        groups=len(several),
        alike=sum(_alike(members, keeps_alike) for members in several),
        unfilled=sum(session["reason"] == _TOO_SMALL for session in sessions),
        last=oldest_first[-1]["created_at"],
    )


def _alike(members: Sequence[Mapping[str, Any]], keeps_alike: bool) -> bool:
    """Return whether a group scored alike. Rewards that are equal may make scores that differ, as
    `train.discount` has those of longer sessions count less: what a step did with it says more."""
    if any(session["reason"] == _ALIKE for session in members):
        return True
    if not keeps_alike and any(session["state"] == "trained" for session in members):
        return False
    rewards = [session["reward"] for session in members]
    return bool(min(rewards) == max(rewards))
