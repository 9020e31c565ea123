"""The advantages of a session that was trained on, from the scores of its group.

The trainer records none. What it took them from is still there: the scores, and the settings. So
this repeats `trainer/advantage.py` where a group alone decides, and says why where it does not.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

from any_agent.config import TrainConfig
from any_agent.errors import AnyAgentError
from router.dashboard.chart import number_text
from router.dashboard.group import GroupPage, same, sessions_of
from router.dashboard.ranks import RankReader, Visitor

_FLOOR = 1e-4  # as the trainer adds to the deviation
MOST = 32
"""Sessions of the largest group whose scores are read."""
_SCORED = {"stale", "truncated", "untrainable", "too_long"}
"""The reasons of a step for leaving out a session whose score it has counted."""


@dataclass(frozen=True, slots=True)
class Advantage:
    """How a session's returns become advantages: ``(return - baseline) / scale``."""

    problem: str = ""
    """The reason why it cannot be told; "" if it can."""
    score: float | None = None
    baseline: float = 0.0
    scale: float = 1.0
    formula: str = ""
    masks_cut: bool = False
    """True if outputs that the limit of tokens cut off were not trained on."""

    @property
    def mean(self) -> float | None:
        """The mean of its calls' advantages; None if it cannot be told."""
        return None if self.score is None else self._of(self.score)

    def of_call(self, call: Mapping[str, Any]) -> float | None:
        """Return the advantage that all trained tokens of a call have; None if it cannot be told,
        or if the call is not trained on."""
        cut = self.masks_cut and call["finish_reason"] == "length"
        if self.score is None or call["untrainable_reason"] or cut:
            return None
        return self._of(call["propagated"] or 0.0)

    def _of(self, value: float) -> float:
        return (value - self.baseline) / self.scale


async def read_advantage(
    ranks: RankReader, visitor: Visitor, info: Mapping[str, Any], train: TrainConfig
) -> Advantage | None:
    """Return a session's advantage; None for a session that was not trained on."""
    if info["state"] != "trained" or info["content"] != "stored":
        return None
    if problem := _beyond_the_group(train):
        return Advantage(problem)
    if not info["group_id"]:
        return Advantage("a session without a group is compared with its batch")
    try:
        return await _of_group(ranks, visitor, info, train)
    except AnyAgentError as error:
        return Advantage(error.message)


def _beyond_the_group(train: TrainConfig) -> str:
    """Return why the settings' advantages need more than a group's scores; "" if they do not."""
    name, norm = train.advantage_estimator, train.normalize_std
    if name not in ("grpo", "rloo"):
        return f"train.advantage_estimator={name} needs more than the group's scores"
    if train.group_by == "role":
        return "train.group_by=role compares each role's scores, which the session's do not tell"
    if norm == "batch":
        return "train.normalize_std=batch divides by the deviation of the step's whole batch"
    if train.overlong_length or train.kl_reward_coef:
        return "train.overlong_length or train.kl_reward_coef changes the returns in the trainer"
    if train.reward_coef != 1:
        return f"train.reward_coef={train.reward_coef:g} scales the advantages in the trainer"
    return ""


async def _of_group(
    ranks: RankReader, visitor: Visitor, info: Mapping[str, Any], train: TrainConfig
) -> Advantage:
    found, more, missing = await sessions_of(
        ranks, visitor, info["group_id"], info["tenant"] or "", MOST
    )
    if missing:
        return Advantage(f"rank {', '.join(map(str, missing))} does not answer")
    if more:
        return Advantage(f"its group has more than {MOST} sessions")
    took_part, problem = _compared(found)
    if problem:
        return Advantage(problem)
    scores = await asyncio.gather(*(_score(ranks, visitor, one["session_id"]) for one in took_part))
    own = next(
        (
            score
            for one, score in zip(took_part, scores, strict=True)
            if one["session_id"] == info["session_id"]
        ),
        None,
    )
    known = [score for score in scores if score is not None]
    return replace(advantage(own, known, train), masks_cut=train.mask_truncated)


def advantages_of(group: GroupPage, train: TrainConfig) -> tuple[dict[str, float], str]:
    """Return the mean advantages of a group's trained sessions by id, and their formula, or the
    reason why they cannot be told; "" where none was trained on."""
    trained = [m.info["session_id"] for m in group.members if m.info["state"] == "trained"]
    if not trained:
        return {}, ""
    took_part, problem = _compared([member.info for member in group.members])
    if group.missing:
        problem = f"rank {', '.join(map(str, group.missing))} does not answer"
    elif group.more:
        problem = f"the group has more than {len(group.members)} sessions"
    scores = {member.info["session_id"]: member.score for member in group.members}
    unread = {member.info["session_id"] for member in group.members if member.problem}
    compared = [one["session_id"] for one in took_part]
    if unread.intersection(compared):
        problem = "the scores of some sessions cannot be read"
    problem = _beyond_the_group(train) or problem
    known = [score for id in compared if (score := scores[id]) is not None]
    found = {
        id: Advantage(problem) if problem else advantage(scores[id], known, train) for id in trained
    }
    told = {id: one.mean for id, one in found.items() if one.mean is not None}
    words = {one.problem or one.formula for one in found.values()}
    return told, words.pop() if len(words) == 1 else ""


def _compared(found: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """Return the sessions of a group that a step compared, and why they cannot be told."""
    took_part = []
    for one in found:
        if one["state"] == "rejected" and one["reason"] not in _SCORED:
            return [], f"session {one['session_id']} of its group was rejected"
        if one["state"] in ("trained", "rejected"):
            took_part.append(one)
    return took_part, "a group of one is compared with its batch" if len(took_part) < 2 else ""


async def _score(ranks: RankReader, visitor: Visitor, session_id: str) -> float | None:
    page = await ranks.of_session(visitor, session_id, "/interactions", start=0, limit=1)
    score = page["score"]
    return None if score is None else float(score)


def advantage(own: float | None, scores: Sequence[float], train: TrainConfig) -> Advantage:
    """Return the advantage of a session by its own score and all of its group's scores."""
    if own is None:
        return Advantage("no call of it counts")
    if len(scores) < 2 or same(scores):
        return Advantage("all of its group scored alike")
    if train.advantage_estimator == "rloo":
        baseline = (math.fsum(scores) - own) / (len(scores) - 1)
        return Advantage(
            score=own,
            baseline=baseline,
            formula=f"{_less(baseline)}: the mean of the scores of the other {len(scores) - 1} "
            "sessions of its group",
        )
    baseline = mean(scores)
    whose = f"of the scores of the group's {len(scores)} sessions"
    if train.normalize_std == "none":
        formula = f"{_less(baseline)}: the mean {whose}"
        return Advantage(score=own, baseline=baseline, formula=formula)
    deviation = stdev(scores)
    return Advantage(
        score=own,
        baseline=baseline,
        scale=deviation + _FLOOR,
        formula=f"({_less(baseline)}) / ({number_text(deviation)} + {_FLOOR:g}): the mean and the "
        f"standard deviation {whose}",
    )


def _less(baseline: float) -> str:
    return f"return {'+' if baseline < 0 else '−'} {number_text(abs(baseline))}"
