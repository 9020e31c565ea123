"""Advantage estimators by name, and DAPO's penalty of long outputs.

They need no torch: rewards are few, float64, and the arithmetic should be readable.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from any_agent.config import TrainConfig
from any_agent.errors import ConfigError
from any_agent.runtime.import_string import NamedRegistry

STD_FLOOR = 1e-4  # added to the standard deviation before dividing, as in TRL
_SAME = 1e-8
"""Scores whose spread is below this share of their size count as equal: the rest is rounding."""


@dataclass(frozen=True, slots=True)
class SessionRewards:
    """One session's interactions, in any fixed order.

    ``rewards`` are r(i), after propagation through the tree. ``counted`` marks the interactions
    that are trainable in kind and not discarded; only those make the score and get an advantage.
    Staleness does not matter here: it is masked later. ``tokens`` are those that each interaction
    sampled, ``roles`` the agents that made them; empty: they have no names.
    """

    rewards: Sequence[float]
    counted: Sequence[bool]
    tokens: Sequence[int] = ()
    roles: Sequence[str] = ()

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

    @property
    def counted_roles(self) -> list[str | None]:
        """The role of each interaction; None where it is not counted."""
        roles = self.roles or [""] * len(self.rewards)
        return [role if c else None for role, c in zip(roles, self.counted, strict=True)]

    def of_role(self, role: str) -> SessionRewards:
        """Return the session as if only the interactions of this role counted."""
        return replace(self, counted=[own == role for own in self.counted_roles])

    @property
    def length(self) -> int:
        """The tokens that the counted interactions sampled."""
        return sum(n for n, c in zip(self.tokens, self.counted, strict=True) if c)


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """The advantages of one group's sessions.

    ``advantages[s][i]`` belongs to interaction i of session s; 0.0 where it is not counted.
    ``baseline`` and ``std`` (ddof 1) are the mean and deviation of the group's scores; GRPO gives
    those that it uses, which may be the batch's. None where too few scores exist.
    """

    advantages: tuple[tuple[float, ...], ...]
    scores: tuple[float | None, ...]
    baseline: float | None
    std: float | None
    zero_variance: bool
    """True if there is nothing to learn from: the caller drops the group and takes another one. All
    its advantages are 0."""
    scale: float = 1.0
    """The divisor of the group's rewards, by the built-in estimators."""
    lone_roles: int = 0
    """Its roles that only one of its several sessions has, which have nothing to be compared
    with."""


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
    """Estimate the advantages of one batch by the configured estimator, those of each role by
    themselves where `train.group_by` is `role`.

    Raises ConfigError, with the known names, for an unknown estimator.
    """
    estimator = ESTIMATORS.find(config.advantage_estimator)
    if config.group_by == "role":
        return _of_roles(groups, config, estimator)
    return estimator(groups, config)


def _of_roles(
    groups: Sequence[Sequence[SessionRewards]], config: TrainConfig, estimator: AdvantageEstimator
) -> list[GroupAdvantages]:
    """Estimate each role by itself: as if only its interactions counted in every session.

    A role that one session of several has is a group with a single score: nothing to compare. A
    group whose roles all have nothing to compare has zero variance.

    Source: the agent-wise normalisation of Dr. MAS (arXiv 2602.08847), within each group.
    """
    counted = [[s.counted_roles for s in group] for group in groups]
    found: list[dict[str, GroupAdvantages]] = [{} for _ in groups]
    every = (role for group in counted for roles in group for role in roles)
    for role in sorted({role for role in every if role is not None}):
        places = [n for n, group in enumerate(counted) if any(role in roles for roles in group)]
        estimates = estimator([[s.of_role(role) for s in groups[n]] for n in places], config)
        for n, estimate in zip(places, estimates, strict=True):
            found[n][role] = estimate
    out = []
    for group, roles_of, of_role in zip(groups, counted, found, strict=True):
        advantages = tuple(
            tuple(
                0.0 if role is None else of_role[role].advantages[s][i]
                for i, role in enumerate(roles)
            )
            for s, roles in enumerate(roles_of)
        )
        sessions_with = Counter(role for roles in roles_of for role in {*roles})
        del sessions_with[None]
        several = len(group) > 1
        out.append(
            GroupAdvantages(
                advantages,
                tuple(s.score for s in group),
                *_mean_and_std(_pool(group)),
                all(e.zero_variance for e in of_role.values()) if of_role else several,
                lone_roles=sum(n == 1 for n in sessions_with.values()) if several else 0,
            )
        )
    return out


@register_advantage_estimator("grpo")
def _grpo(groups: Sequence[Sequence[SessionRewards]], config: TrainConfig) -> list[GroupAdvantages]:
    return group_advantages(groups, config.normalize_std)


def group_advantages(
    groups: Sequence[Sequence[SessionRewards]], normalize_std: str | None = "group"
) -> list[GroupAdvantages]:
    """Compute ``A(i) = (r(i) - b) / (std + 1e-4)`` for every group of one batch.

    b is the mean and std the deviation (ddof 1) of the scores of the group's sessions, each
    counting once however many turns it has. ``batch`` takes std over the scores of the batch, and
    ``none``, which gives Dr.GRPO's advantages, does not divide.

    A group of one session takes b and std from the batch: from all scores of the groups that stay
    in it, that is without those of zero variance, so that dropping these first changes nothing.
    It is never dropped itself. Where the batch's scores are equal, or are a single one, there is
    no scale to divide by, and its advantages stay undivided.

    A group of several sessions with fewer than two scores has nothing to compare: zero variance.
    Dropping such groups, and taking others, is DAPO's dynamic sampling (arXiv 2503.14476).

    Source: GRPO (arXiv 2402.03300, eq. 10), over sessions instead of single completions;
    Dr.GRPO (arXiv 2503.20783).
    """
    pools, stays, batch = _pools(groups)
    out = []
    for group, pool, stay in zip(groups, pools, stays, strict=True):
        baseline, std = _mean_and_std(pool)
        if normalize_std == "batch":
            _, std = _mean_and_std(pool := batch)
        scale = 1.0 if std is None or normalize_std == "none" or _equal(pool) else std + STD_FLOOR
        advantages = tuple(_of_session(s, baseline, 0.0, scale, stay) for s in group)
        scores = tuple(s.score for s in group)
        out.append(GroupAdvantages(advantages, scores, baseline, std, not stay, scale))
    return out


@register_advantage_estimator("rloo")
def leave_one_out(
    groups: Sequence[Sequence[SessionRewards]], config: TrainConfig
) -> list[GroupAdvantages]:
    """Compute ``A(i) = r(i) - b``, b the mean score of the group's **other** sessions.

    Groups of one and groups without variance are treated as in :func:`group_advantages`.

    Source: RLOO (arXiv 2402.14740), over sessions instead of single completions.
    """
    pools, stays, _ = _pools(groups)
    baselines = [
        [_mean_of_others(pool, s.score) for s in group]
        for group, pool in zip(groups, pools, strict=True)
    ]
    return _from_baselines(groups, baselines, stays, config.normalize_std)


@register_advantage_estimator("reinforce_pp")
def batch_advantages(
    groups: Sequence[Sequence[SessionRewards]], config: TrainConfig
) -> list[GroupAdvantages]:
    """Compute ``A(i) = (r(i) - b) / (std + 1e-4)`` with mean and deviation over the whole batch.

    Every session counts once. Groups have no part in it, so that none lacks variance.

    Source: REINFORCE++ (arXiv 2501.03262), whose KL penalty is in the rewards already.
    """
    stays = [len(group) == 1 or bool(_pool(group)) for group in groups]
    mean, _ = _mean_and_std([score for group in groups for score in _pool(group)])
    return _from_baselines(groups, [[mean] * len(g) for g in groups], stays, config.normalize_std)


@register_advantage_estimator("reinforce_pp_baseline")
def batch_advantages_of_groups(
    groups: Sequence[Sequence[SessionRewards]], config: TrainConfig
) -> list[GroupAdvantages]:
    """Compute ``A'(i) = r(i) - b`` with the mean b of the group, then
    ``A(i) = (A'(i) - mean) / (std + 1e-4)`` over the A' of the whole batch.

    Mean and std are over sessions, each once. Groups of one and groups without variance are treated
    as in :func:`group_advantages`.

    Source: REINFORCE++ with baseline (arXiv 2501.03262).
    """
    pools, stays, _ = _pools(groups)
    baselines = [
        [_mean_and_std(pool)[0]] * len(group) for group, pool in zip(groups, pools, strict=True)
    ]
    return _from_baselines(groups, baselines, stays, config.normalize_std)


@register_advantage_estimator("opo")
def length_weighted_advantages(
    groups: Sequence[Sequence[SessionRewards]], config: TrainConfig
) -> list[GroupAdvantages]:
    """Compute ``A(i) = r(i) - b`` with ``b = sum(l s) / sum(l)`` over the group's sessions of score
    s and l sampled tokens: the baseline of least variance where a session's gradient grows with its
    length.

    Groups of one and groups without variance are treated as in :func:`group_advantages`.

    Source: OPO (arXiv 2505.23585), over sessions instead of single completions.
    """
    _, stays, _ = _pools(groups)
    every = [s for group, stay in zip(groups, stays, strict=True) if stay for s in group]
    baselines = [
        [_mean_by_length(every if len(group) == 1 else group)] * len(group) for group in groups
    ]
    return _from_baselines(groups, baselines, stays, config.normalize_std)


@register_advantage_estimator("maxrl")
def success_advantages(
    groups: Sequence[Sequence[SessionRewards]], config: TrainConfig
) -> list[GroupAdvantages]:
    """Compute ``A(i) = (r(i) - b) / b``, b the mean score of the group: with rewards of 0 and 1 the
    gradient approaches that of the log of the chance to succeed, so that rare successes weigh more.

    Groups of one and groups without variance are treated as in :func:`group_advantages`. Raises
    ConfigError for a negative score.

    Source: MaxRL (arXiv 2602.02710), over sessions instead of single completions.
    """
    pools, stays, _ = _pools(groups)
    out = []
    for group, pool, stay in zip(groups, pools, stays, strict=True):
        if min(pool, default=0.0) < 0:
            raise ConfigError(
                f"train.advantage_estimator=maxrl divides by the mean score of a group, and a "
                f"session scored {min(pool):g}: give rewards of 0 and above, or use another one"
            )
        baseline, _ = _mean_and_std(pool)
        own = _mean_and_std(_pool(group))
        scale = baseline if baseline else 1.0
        advantages = tuple(_of_session(s, baseline, 0.0, scale, stay) for s in group)
        scores = tuple(s.score for s in group)
        out.append(GroupAdvantages(advantages, scores, *own, not stay, scale))
    return out


def _from_baselines(
    groups: Sequence[Sequence[SessionRewards]],
    baselines: Sequence[Sequence[float | None]],
    stays: Sequence[bool],
    normalize_std: str | None,
) -> list[GroupAdvantages]:
    """Subtract each session's baseline; ``batch``: also the mean of what is left over the batch,
    and divide by its deviation."""
    centred = [
        score - b
        for group, of_group, stay in zip(groups, baselines, stays, strict=True)
        for session, b in zip(group, of_group, strict=True)
        if stay and b is not None and (score := session.score) is not None
    ]
    mean, std = _mean_and_std(centred)
    shift, scale = 0.0, 1.0
    if normalize_std == "batch" and mean is not None and std is not None and not _equal(centred):
        shift, scale = mean, std + STD_FLOOR
    out = []
    for group, of_group, stay in zip(groups, baselines, stays, strict=True):
        pairs = zip(group, of_group, strict=True)
        advantages = tuple(_of_session(s, b, shift, scale, stay) for s, b in pairs)
        scores, own = tuple(s.score for s in group), _mean_and_std(_pool(group))
        out.append(GroupAdvantages(advantages, scores, *own, not stay, scale))
    return out


def _pools(
    groups: Sequence[Sequence[SessionRewards]],
) -> tuple[list[list[float]], list[bool], list[float]]:
    """Return the scores that each group is compared with, whether it has something to learn from,
    and the scores of the groups that have, with which a group of one is compared."""
    pools = [_pool(group) for group in groups]
    stays = [len(group) == 1 or not _equal(pool) for group, pool in zip(groups, pools, strict=True)]
    batch = [score for pool, stay in zip(pools, stays, strict=True) if stay for score in pool]
    given = zip(groups, pools, strict=True)
    return [batch if len(group) == 1 else own for group, own in given], stays, batch


def _pool(group: Sequence[SessionRewards]) -> list[float]:
    """Return the scores that a group's baseline and deviation are taken over."""
    return [score for session in group if (score := session.score) is not None]


def _mean_by_length(sessions: Sequence[SessionRewards]) -> float | None:
    """Return the mean of scores, each weighted by its session's tokens; None without any."""
    pairs = [(s.length, score) for s in sessions if (score := s.score) is not None]
    total = sum(length for length, _ in pairs)
    return math.fsum(length * score for length, score in pairs) / total if total else None


def _mean_of_others(pool: Sequence[float], score: float | None) -> float | None:
    """Return the mean of a pool without one score that it contains; None if no other is left."""
    if score is None or len(pool) < 2:
        return None
    return (math.fsum(pool) - score) / (len(pool) - 1)


def _of_session(
    session: SessionRewards, baseline: float | None, shift: float, scale: float, stays: bool
) -> tuple[float, ...]:
    if baseline is None or not stays:
        return (0.0,) * len(session.rewards)
    return tuple(
        (r - baseline - shift) / scale if counted else 0.0
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


def overlong_penalty(length: int, config: TrainConfig) -> float:
    """Return what the reward of an output of ``length`` tokens loses: from 0 to the factor.

    ``factor * min(max(length - (L - buffer), 0) / buffer, 1)`` with L = `train.overlong_length`:
    it grows over the last ``buffer`` tokens below L. 0 without such a length.

    Source: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), with a factor.
    """
    if config.overlong_length is None:
        return 0.0
    buffer, factor = config.overlong_buffer, config.overlong_penalty
    assert buffer is not None and factor is not None, "settings are completed"
    return factor * min(max(length - (config.overlong_length - buffer), 0) / buffer, 1.0)
