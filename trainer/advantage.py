"""Advantage estimators by name. GRPO's compares each interaction's reward with its group's mean.

It needs no torch: rewards are few, float64, and the arithmetic should be readable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from any_agent.config import TrainConfig
from any_agent.runtime.import_string import NamedRegistry

STD_FLOOR = 1e-4  # added to the standard deviation before dividing, as in TRL
_SAME = 1e-8
"""Scores whose spread is below this share of their size count as equal: the rest is rounding."""


@dataclass(frozen=True, slots=True)
class SessionRewards:
    """One session's interactions, in any fixed order.

    ``rewards`` are r(i), after propagation through the tree. ``counted`` marks the interactions
    that are trainable in kind and not discarded; only those make the score and get an advantage.
    Staleness does not matter here: it is masked later.
    """

    rewards: Sequence[float]
    counted: Sequence[bool]

    def __post_init__(self) -> None:
        if len(self.rewards) != len(self.counted):
            raise ValueError("a session needs one flag per reward")
        for i, reward in enumerate(self.rewards):
            if not math.isfinite(reward):
                raise ValueError(f"the reward of interaction {i} is {reward}")

    @property
    def score(self) -> float | None:
        """The mean of r over the counted interactions; None if none counts.

        Such a session has no information about the policy, so it enters neither the baseline nor
        the standard deviation.
        """
        counted = [r for r, c in zip(self.rewards, self.counted, strict=True) if c]
        return math.fsum(counted) / len(counted) if counted else None


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """The advantages of one group's sessions.

    ``advantages[s][i]`` belongs to interaction i of session s; 0.0 where it is not counted.
    ``std`` has ddof 1 and is None where fewer than two scores exist; for a group of one,
    ``baseline`` and ``std`` are the batch's.
    """

    advantages: tuple[tuple[float, ...], ...]
    scores: tuple[float | None, ...]
    baseline: float | None
    std: float | None
    zero_variance: bool
    """True if there is nothing to learn from: the caller drops the group and takes another one. All
    its advantages are 0."""


AdvantageEstimator: TypeAlias = Callable[
    [Sequence[Sequence[SessionRewards]], TrainConfig], list[GroupAdvantages]
]
"""A function that returns the advantages of every group of one batch, in their order."""
ESTIMATORS: NamedRegistry[AdvantageEstimator] = NamedRegistry(
    "advantage estimator", "train.advantage_estimator"
)


def register_advantage_estimator(name: str) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Decorate an estimator, so that `train.advantage_estimator` can name it in this process."""
    return lambda estimator: ESTIMATORS.register(name, estimator)


def estimate_advantages(
    groups: Sequence[Sequence[SessionRewards]], config: TrainConfig
) -> list[GroupAdvantages]:
    """Estimate the advantages of one batch by the configured estimator.

    Raises ConfigError, with the known names, for an unknown estimator.
    """
    return ESTIMATORS.find(config.advantage_estimator or config.preset)(groups, config)


@register_advantage_estimator("grpo")
def _grpo(groups: Sequence[Sequence[SessionRewards]], config: TrainConfig) -> list[GroupAdvantages]:
    return group_advantages(groups, normalize_std=config.normalize_std)


def group_advantages(
    groups: Sequence[Sequence[SessionRewards]], *, normalize_std: bool = True
) -> list[GroupAdvantages]:
    """Compute ``A(i) = (r(i) - b) / (std + 1e-4)`` for every group of one batch.

    b is the mean and std the deviation (ddof 1) of the scores of the group's sessions, each
    counting once however many turns it has. ``normalize_std=False`` gives Dr.GRPO's advantages.

    A group of one session takes b and std from the batch: from all scores of the groups that stay
    in it, that is without those of zero variance, so that dropping these first changes nothing.
    It is never dropped itself. Where the batch's scores are equal, or are a single one, there is
    no scale to divide by, and its advantages stay undivided.

    A group of several sessions with fewer than two scores has nothing to compare: zero variance.

    Source: GRPO (arXiv 2402.03300, eq. 10), over sessions instead of single completions;
    Dr.GRPO (arXiv 2503.20783).
    """
    pools = [_pool(group) for group in groups]
    stays = [len(group) == 1 or not _equal(pool) for group, pool in zip(groups, pools, strict=True)]
    batch = [score for pool, stay in zip(pools, stays, strict=True) if stay for score in pool]
    out = []
    for group, own, stay in zip(groups, pools, stays, strict=True):
        pool = batch if len(group) == 1 else own
        baseline, std = _mean_and_std(pool)
        scale = 1.0 if std is None or not normalize_std or _equal(pool) else std + STD_FLOOR
        out.append(
            GroupAdvantages(
                advantages=tuple(_of_session(s, baseline, scale, stay) for s in group),
                scores=tuple(session.score for session in group),
                baseline=baseline,
                std=std,
                zero_variance=not stay,
            )
        )
    return out


def _pool(group: Sequence[SessionRewards]) -> list[float]:
    """Return the scores that a group's baseline and deviation are taken over."""
    return [score for session in group if (score := session.score) is not None]


def _of_session(
    session: SessionRewards, baseline: float | None, scale: float, stays: bool
) -> tuple[float, ...]:
    if baseline is None or not stays:
        return (0.0,) * len(session.rewards)
    return tuple(
        (r - baseline) / scale if counted else 0.0
        for r, counted in zip(session.rewards, session.counted, strict=True)
    )


def _mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    n = len(values)
    if n == 0:
        return None, None
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))


def _equal(values: Sequence[float]) -> bool:
    if len(values) < 2:
        return True
    return max(values) - min(values) <= _SAME * max(1.0, *map(abs, values))
