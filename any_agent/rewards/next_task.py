"""The choice of the next task to run: tasks that taught nothing are drawn less.

It is the rule of `rollout.sampling: learnable` for agents that bring their own tasks: an item of a
dataset that taught nothing n times in a row rests for 2**n - 1 passes, so it has a part of 2**-n of
the draws, which is a task's weight here. Nothing is remembered between two requests.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence

from any_agent.protocol.rl import SessionLine
from any_agent.protocol.tasks import MOST_RESTS, JudgedGroup, NextTask, TaskFacts

_DULL = ("zero_variance", "untrainable")
"""The trainer's reasons against groups that taught nothing."""


def facts_of(
    task_id: str,
    sessions: Iterable[SessionLine],
    *,
    keeps_alike: bool = False,
    unscored: Container[str] = (),
) -> TaskFacts:
    """Return what a task's sessions tell; ``keeps_alike``: steps also take groups that scored
    alike, which teach nothing; ``unscored`` has the ids of sessions whose score is not their
    reward."""
    groups: defaultdict[tuple[str | None, str], list[SessionLine]] = defaultdict(list)
    for session in (own := [one for one in sessions if one.mode == "train"]):
        # A group's id is its tenant's.
        groups[session.tenant, session.group_id or session.session_id].append(session)
    rewards = [session.reward for session in own if session.reward is not None]
    judged = [_judged(members, keeps_alike, unscored) for members in groups.values()]
    return _facts(task_id, len(own), rewards, [one for one in judged if one is not None])


def merged(answers: Iterable[Iterable[TaskFacts]]) -> list[TaskFacts]:
    """Return the facts of several ranks as one list: each rank knows its own sessions alone."""
    by_task: defaultdict[str, list[TaskFacts]] = defaultdict(list)
    for answer in answers:
        for facts in answer:
            by_task[facts.task_id].append(facts)
    return [_sum(facts) for facts in by_task.values()]


def draw(candidates: Sequence[TaskFacts]) -> NextTask:
    """Return one of the tasks, drawn by their weights."""
    (chosen,) = random.choices(candidates, [facts.weight for facts in candidates])
    return NextTask(**chosen.model_dump(), candidates=list(candidates))


def _judged(
    members: Sequence[SessionLine], keeps_alike: bool, unscored: Container[str]
) -> JudgedGroup | None:
    """Return what the trainer made of a group; None before it has decided, or if that is not
    known."""
    trained = any(session.state == "trained" for session in members)
    if not trained and not any(session.reason in _DULL for session in members):
        return None
    if keeps_alike and trained and len(members) > 1:
        if any(session.session_id in unscored for session in members):
            return None
        trained = len({session.reward or 0.0 for session in members}) > 1
    return JudgedGroup(at=max(session.created_at for session in members), taught=trained)


def _sum(facts: Sequence[TaskFacts]) -> TaskFacts:
    first = facts[0]
    rewards = [one.mean_reward * one.rewards for one in facts if one.mean_reward is not None]
    groups = [group for one in facts for group in one.latest_groups]
    known = sum(one.rewards for one in facts)
    summed = _facts(first.task_id, sum(one.sessions for one in facts), [], groups)
    mean = math.fsum(rewards) / known if known else None
    return summed.model_copy(update={"rewards": known, "mean_reward": mean})


def _facts(
    task_id: str, sessions: int, rewards: Sequence[float], groups: Iterable[JudgedGroup]
) -> TaskFacts:
    return TaskFacts(
        task_id=task_id,
        sessions=sessions,
        rewards=len(rewards),
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
        latest_groups=sorted(groups, key=lambda group: -group.at)[:MOST_RESTS],
    )
