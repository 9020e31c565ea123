"""With `train.group_by=role` each agent of a session is compared with itself in other sessions."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from any_agent.config import TrainConfig
from any_agent.types import SampledSession, Trajectory
from tests.support.trainer.episodes import interaction
from trainer.advantage import STD_FLOOR, SessionRewards, estimate_advantages
from trainer.batch import ZeroVarianceGroups, session_rewards, training_batch

Call = tuple[str, float]
"""A call's role and reward."""


def of_calls(*calls: Call, left_out: Sequence[int] = ()) -> SessionRewards:
    roles, rewards = zip(*calls, strict=True)
    counted = [k not in left_out for k in range(len(calls))]
    return SessionRewards(rewards, counted, [10 * (k + 1) for k in range(len(calls))], roles)


GROUPS = [
    [
        of_calls(("plan", 1.0), ("code", 0.5), ("code", 0.25)),
        of_calls(("plan", 0.0), ("code", 0.75), ("code", 9.0), left_out=(2,)),
        of_calls(("plan", 0.5), ("test", 3.0), ("", 0.125)),
        of_calls(("", 0.375), ("plan", 0.25), ("plan", 0.5)),
    ],
    # Its planners score alike; its coders do not.
    [
        of_calls(("plan", 2.0), ("code", 1.0)),
        of_calls(("plan", 1.0), ("plan", 3.0), ("code", 4.0)),
    ],
    [of_calls(("plan", 4.0), ("code", 0.0))],
    # Nothing to compare: the one role of several scores alike, and each other role is alone.
    [of_calls(("plan", 1.0), ("code", 2.0)), of_calls(("plan", 1.0), ("test", 5.0))],
]
LONE = [1, 0, 0, 2]
DULL = [False, False, False, True]


def scores_of(group: Sequence[SessionRewards], role: str) -> list[float | None]:
    """The mean reward of a role's calls in each session, in float64."""
    out: list[float | None] = []
    for one in group:
        calls = zip(one.rewards, one.counted, one.roles, strict=True)
        own = [r for r, counted, name in calls if counted and name == role]
        out.append(float(np.mean(own)) if own else None)
    return out


def expected(place: int, s: int, i: int, estimator: str, norm: str) -> float:
    """An advantage by its definition, from the numbers above alone."""
    one = GROUPS[place][s]
    role = one.roles[i]
    if not one.counted[i]:
        return 0.0
    pools = [[x for x in scores_of(group, role) if x is not None] for group in GROUPS]
    useful = [len(g) == 1 or len(set(pool)) > 1 for g, pool in zip(GROUPS, pools, strict=True)]
    batch = [x for pool, use in zip(pools, useful, strict=True) if use for x in pool]
    if not useful[place]:
        return 0.0
    pool = batch if len(GROUPS[place]) == 1 else pools[place]
    own = scores_of(GROUPS[place], role)[s]
    assert own is not None
    if estimator == "rloo":
        others = list(pool)
        others.remove(own)
        return one.rewards[i] - statistics.fmean(others)
    spread = {"group": pool, "batch": batch}.get(norm)
    scale = 1.0 if spread is None else float(np.std(spread, ddof=1)) + STD_FLOOR
    return (one.rewards[i] - statistics.fmean(pool)) / scale


@pytest.mark.parametrize(
    ("estimator", "norm"),
    [("grpo", "group"), ("grpo", "batch"), ("grpo", "none"), ("rloo", "none")],
)
def test_each_role_has_its_own_baseline_and_deviation(estimator: str, norm: str) -> None:
    config = TrainConfig(
        advantage_estimator=estimator,
        normalize_std=norm,
        group_by="role",  # type: ignore[arg-type]
    )
    found = estimate_advantages(GROUPS, config)
    for place, estimate in enumerate(found):
        for s, of_session in enumerate(estimate.advantages):
            for i, advantage in enumerate(of_session):
                wanted = expected(place, s, i, estimator, norm)
                assert advantage == pytest.approx(wanted, abs=1e-12), (place, s, i)
        assert estimate.scores == tuple(one.score for one in GROUPS[place])
    assert [one.lone_roles for one in found] == LONE
    assert [one.zero_variance for one in found] == DULL


def roles_law() -> None:
    test_each_role_has_its_own_baseline_and_deviation("grpo", "group")


def test_one_role_for_all_is_no_role_at_all() -> None:
    """A baseline for each role is the session's where all calls have one, whatever its name."""
    draw = random.Random(3)
    for name in ("", "solo"):
        groups = [
            [
                of_calls(*[(name, draw.random()) for _ in range(draw.randint(1, 3))])
                for _ in range(n)
            ]
            for n in (4, 1, 3)
        ]
        for estimator in ("grpo", "rloo", "opo", "maxrl", "reinforce_pp_baseline"):
            plain = TrainConfig(advantage_estimator=estimator)
            of_roles = TrainConfig(advantage_estimator=estimator, group_by="role")
            pairs = zip(
                estimate_advantages(groups, plain),
                estimate_advantages(groups, of_roles),
                strict=True,
            )
            for one, other in pairs:
                assert one.advantages == other.advantages
                assert (one.zero_variance, other.lone_roles) == (other.zero_variance, 0)


def of_two(id: str, plan: float, code: float) -> Trajectory:
    """A session of a planner and a coder, who talk apart."""
    nodes = [interaction(f"{id}-{k}", session=id, reward=r) for k, r in enumerate((plan, code))]
    nodes[0].request, nodes[1].request = {"role": "plan"}, {"role": "code"}
    return Trajectory(id, "g", nodes)


def test_rows_have_the_advantages_of_their_roles_and_lone_ones_are_counted() -> None:
    config = TrainConfig(normalize_std="none", group_by="role")
    good, bad = of_two("good", 1.0, 0.0), of_two("bad", 0.0, 0.5)
    bad.interactions.append(interaction("bad-2", session="bad", reward=7.0))
    bad.interactions[2].request = {"role": "test"}
    batch = training_batch([[good, bad]], config, step=0, eta=0, step_of_version={0: 0})
    assert [float(row["advantages"]) for row in batch.rows] == [0.5, -0.25, -0.5, 0.25, 0.0]
    assert (batch.lone_roles, batch.trained, batch.rejected) == (1, ["good", "bad"], {})
    plain = config.model_copy(update={"group_by": "session"})
    batch = training_batch([[good, bad]], plain, step=0, eta=0, step_of_version={0: 0})
    assert batch.lone_roles == 0
    assert [float(row["advantages"]) for row in batch.rows] == [-0.5, -1.5, -1.5, -1.0, 5.5]


def test_a_group_is_kept_for_one_role_that_differs() -> None:
    """Both sessions score one half, but not for the same reason."""
    group = [of_two("a", 1.0, 0.0), of_two("b", 0.0, 1.0)]
    of_roles = TrainConfig(group_by="role")
    assert ZeroVarianceGroups(of_roles).reject_reason(group) is None
    assert ZeroVarianceGroups(TrainConfig()).reject_reason(group) == "zero_variance"
    alike = [of_two("a", 1.0, 0.0), of_two("b", 1.0, 0.0)]
    dull, plain = ZeroVarianceGroups(of_roles), ZeroVarianceGroups(TrainConfig())
    assert dull.reject_reason(alike) == plain.reject_reason(alike) == "zero_variance"
    assert str(dull).endswith("the runs of an item score the same in each role")
    assert str(plain).endswith("the runs of an item all score the same, in the last group: 0.5")


def test_rows_of_a_workflow_have_their_roles() -> None:
    rows = [
        {"loss_mask": np.array([0, 1]), "versions": np.array([-1, 0]), "rewards": np.asarray(1.0)}
    ] * 2
    sampled = SampledSession("s", "g", rows, [None, None], roles=["plan", "code"])
    assert session_rewards(sampled, TrainConfig()).counted_roles == ["plan", "code"]
    nameless = SampledSession("s", "g", rows, [None, None])
    assert session_rewards(nameless, TrainConfig()).counted_roles == ["", ""]
