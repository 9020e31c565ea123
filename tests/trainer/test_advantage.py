from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_agent.config import TrainConfig
from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from trainer.advantage import STD_FLOOR, SessionRewards, estimate_advantages, group_advantages


def session(*rewards: float, counted: list[bool] | None = None) -> SessionRewards:
    """A session whose calls sampled 10, 20, ... tokens, each times its reward and more."""
    tokens = [round(10 * (k + 1) * (1 + min(9.0, abs(r)))) for k, r in enumerate(rewards)]
    flags = counted if counted is not None else [True] * len(rewards)
    return SessionRewards(rewards, flags, tokens)


def test_advantages_of_the_documents_worked_example_hold() -> None:
    """Discount 0.9; sessions right; wrong then right; wrong, wrong; wrong, wrong."""
    group = [session(1.0), session(0.9, 1.0), session(0.0, 0.0), session(0.0, 0.0)]
    (got,) = group_advantages([group])
    assert got.scores == (1.0, 0.95, 0.0, 0.0)
    assert got.baseline == pytest.approx(0.4875)
    assert got.std is not None and round(got.std, 4) == 0.5633
    rounded = tuple(tuple(round(a, 2) for a in of_session) for of_session in got.advantages)
    assert rounded == ((0.91,), (0.73, 0.91), (-0.87, -0.87), (-0.87, -0.87))
    assert not got.zero_variance


@pytest.mark.parametrize(
    "group",
    [
        # Divided by 1e-4 their turns would get advantages in the hundreds.
        [session(0.9, 1.0), session(1.0, 0.9)],
        # Their scores differ by rounding.
        [session(0.1, 0.2, 0.3), session(0.2)],
        # One score of several.
        [session(1.0), session(9.0, counted=[False])],
    ],
)
def test_a_group_with_nothing_to_compare_has_no_advantage(group: list[SessionRewards]) -> None:
    (got,) = group_advantages([group])
    assert got.zero_variance
    assert not any(advantage for of_session in got.advantages for advantage in of_session)


def test_a_group_of_one_has_the_baseline_of_the_batch() -> None:
    got = group_advantages([[session(0.9, 1.0)], [session(0.95)]])
    assert got[0].advantages[0] == pytest.approx((-0.05, 0.05)), "without a deviation"
    (alone,) = group_advantages([[session(3.0)]])
    assert alone.advantages == ((0.0,),) and alone.std is None and not alone.zero_variance


def config(estimator: str, **more: object) -> TrainConfig:
    return TrainConfig(advantage_estimator=estimator, **more)  # type: ignore[arg-type]


UNEVEN = [
    [session(1.0), session(0.9, 1.0), session(0.0, 0.0)],
    [session(2.0), session(4.0), session(3.0, 3.0, counted=[True, False]), session(1.0)],
    [session(0.5), session(0.5)],
    [session(7.0)],
]
SCORES = [[1.0, 0.95, 0.0], [2.0, 4.0, 3.0, 1.0], [0.5, 0.5], [7.0]]
STAYS = [0, 1, 3]
"""The groups that have something to compare."""


def baselines(estimator: str) -> list[list[float]]:
    """Each session's; a group of one is compared with the batch, without the dropped groups."""
    batch = [score for k in STAYS for score in SCORES[k]]
    out = []
    for scores in SCORES:
        pool = scores if len(scores) > 1 else batch
        if estimator == "reinforce_pp":
            pool = [score for group in SCORES for score in group]
        if estimator == "opo":
            members = UNEVEN[SCORES.index(scores)] if len(scores) > 1 else IN_BATCH
            out.append([mean_by_length(members)] * len(scores))
        elif estimator == "rloo":
            without = [list(pool) for _ in scores]
            for left, score in zip(without, scores, strict=True):
                left.remove(score)
            out.append([statistics.fmean(left) for left in without])
        else:
            out.append([statistics.fmean(pool)] * len(scores))
    return out


IN_BATCH = [one for k in STAYS for one in UNEVEN[k]]


def mean_by_length(members: list[SessionRewards]) -> float:
    """The mean score, each session's as often as it has sampled tokens that count."""
    every = []
    for one in members:
        counts = zip(one.tokens, one.counted, strict=True)
        every += [one.score] * sum(n for n, counted in counts if counted)
    return statistics.fmean(score for score in every if score is not None)


def advantages_equal_their_formula(estimator: str, normalize_std: str) -> None:
    """A session counts once, by its score; the deviation has ddof 1."""
    stays = [0, 1, 2, 3] if estimator == "reinforce_pp" else STAYS
    b = baselines(estimator)
    centred = [s - b[k][i] for k in stays for i, s in enumerate(SCORES[k])]
    of_batch = [score for k in stays for score in SCORES[k]] if estimator == "grpo" else centred
    got = estimate_advantages(UNEVEN, config(estimator, normalize_std=normalize_std))
    for k, (group, scores) in enumerate(zip(UNEVEN, SCORES, strict=True)):
        mean, scale = 0.0, 1.0
        if normalize_std == "group":
            pool = scores if len(scores) > 1 else of_batch
            scale = statistics.stdev(pool) + STD_FLOOR
            assert got[k].std == pytest.approx(statistics.stdev(pool))
        if normalize_std == "batch":
            mean = 0.0 if estimator == "grpo" else statistics.fmean(centred)
            scale = statistics.stdev(of_batch) + STD_FLOOR
        assert got[k].scores == tuple(scores) and got[k].zero_variance is (k not in stays)
        assert estimator != "grpo" or got[k].baseline == pytest.approx(b[k][0])
        for s, one in enumerate(group):
            pairs = zip(one.rewards, one.counted, strict=True)
            expected = [(r - b[k][s] - mean) / scale if c and k in stays else 0.0 for r, c in pairs]
            assert got[k].advantages[s] == pytest.approx(expected)


ESTIMATORS = ("grpo", "rloo", "opo", "reinforce_pp", "reinforce_pp_baseline")
NORMALIZED = [(e, n) for e in ESTIMATORS for n in ("batch", "none")] + [("grpo", "group")]


@pytest.mark.parametrize(("estimator", "normalize_std"), NORMALIZED)
def test_advantages_equal_their_formula(estimator: str, normalize_std: str) -> None:
    advantages_equal_their_formula(estimator, normalize_std)


def test_maxrl_divides_by_the_mean_score_and_refuses_negative_ones() -> None:
    got = estimate_advantages(UNEVEN, config("maxrl"))
    b = baselines("grpo")
    for k, group in enumerate(UNEVEN):
        for s, one in enumerate(group):
            pairs = zip(one.rewards, one.counted, strict=True)
            of = [(r - b[k][s]) / b[k][s] if c and k in STAYS else 0.0 for r, c in pairs]
            assert got[k].advantages[s] == pytest.approx(of)
    nothing = [[session(0.0), session(0.0)], [session(0.0)]]
    for estimate in estimate_advantages(nothing, config("maxrl")):
        assert not any(chain(*estimate.advantages))
    with fails_with(ConfigError, "scored -1"):
        estimate_advantages([[session(1.0), session(-1.0)]], config("maxrl"))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_batch_without_variance_is_not_blown_up(estimator: str) -> None:
    for groups in ([[session(0.9, 1.0)], [session(0.95)]], [[session(1.0)]], [[session(1.0)] * 3]):
        for got in estimate_advantages(groups, config(estimator)):
            assert all(abs(a) <= 0.05 + 1e-9 for of_session in got.advantages for a in of_session)


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "maxrl"])
def test_a_session_without_a_counted_reward_gets_no_advantage(estimator: str) -> None:
    mute = session(9.0, counted=[False])
    groups = [[session(1.0), session(0.0), mute], [mute], [mute, mute]]
    one, alone, two = estimate_advantages(groups, config(estimator))
    assert one.advantages[2] == (0.0,) and one.scores == (1.0, 0.0, None)
    assert alone.advantages == ((0.0,),) and not alone.zero_variance
    assert two.advantages == ((0.0,), (0.0,)) and two.zero_variance


def test_rewards_must_be_finite_and_have_a_flag_each() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        with fails_with(ValueError, "interaction 1"):
            session(0.0, bad)
    with fails_with(ValueError, "flag"):
        SessionRewards([1.0], [])


REWARDS = st.lists(st.floats(-10, 10), min_size=1, max_size=4)
GROUPS = st.lists(st.lists(REWARDS, min_size=1, max_size=5), min_size=1, max_size=5)


@pytest.mark.parametrize(("estimator", "normalize_std"), NORMALIZED)
@given(GROUPS, st.randoms())
@pytest.mark.service
def test_neither_order_nor_groups_without_variance_change_an_advantage(
    estimator: str, normalize_std: str, groups: list[list[list[float]]], r: random.Random
) -> None:
    built = [[session(*rewards) for rewards in group] for group in groups]
    c = config(estimator, normalize_std=normalize_std)
    got = estimate_advantages(built, c)
    assert all(math.isfinite(a) for g in got for of_session in g.advantages for a in of_session)
    stays = [k for k, g in enumerate(got) if not g.zero_variance]
    assert estimate_advantages([built[k] for k in stays], c) == [got[k] for k in stays]
    order = r.sample(range(len(built)), len(built))
    inner = [r.sample(range(len(group)), len(group)) for group in built]
    shuffled = estimate_advantages([[built[k][s] for s in inner[k]] for k in order], c)
    for place, k in enumerate(order):
        assert shuffled[place].zero_variance is got[k].zero_variance
        for other, s in zip(shuffled[place].advantages, inner[k], strict=True):
            assert other == pytest.approx(got[k].advantages[s], abs=1e-12)


def test_torch_is_not_needed() -> None:
    code = "import sys, trainer.advantage; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
