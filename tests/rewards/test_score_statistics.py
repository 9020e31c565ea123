"""Means, intervals and pass@k against what is known of them."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from any_agent.rewards.score_statistics import estimate, pass_at_k, student975
from tests.support.errors import fails_with


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (3, 3.1824), (30, 2.0423), (31, 2.0395), (60, 2.0003), (1000, 1.9623)],
)
def test_students_quantiles_are_those_of_tables(freedom: int, quantile: float) -> None:
    """As tables have them (scipy.stats.t.ppf(0.975, freedom))."""
    assert student975(freedom) == pytest.approx(quantile, abs=6e-5)


def test_quantiles_fall_towards_the_normal_one() -> None:
    quantiles = [student975(n) for n in range(1, 2000)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert student975(10**9) == pytest.approx(1.959964)


def test_an_estimate_has_the_interval_of_students_t() -> None:
    """Of 0, 1, 2 and 5: the mean is 2, the variance 14/3."""
    found = estimate([0.0, 1.0, 2.0, 5.0])
    assert found is not None and found.interval is not None
    half = 3.1824 * math.sqrt(14 / 3 / 4)
    assert (found.mean, found.items) == (2.0, 4)
    assert found.interval == pytest.approx((2 - half, 2 + half))


def test_an_interval_of_values_from_0_to_1_stays_there() -> None:
    for values, interval in (
        ([0.25, 1.0], (0.0, 1.0)),
        ([0.5, 0.5, 0.75], (0.2248, 0.9419)),
        ([0.25, 1.5], (-7.066, 8.816)),
        ([-1.0, 1.0], (-12.706, 12.706)),
    ):
        found = estimate(values)
        assert found is not None and found.interval == pytest.approx(interval, abs=1e-3)


def test_too_few_items_have_no_interval() -> None:
    assert estimate([]) is None
    assert estimate([0.5]) == (0.5, None, 1)
    assert estimate([0.5, 0.5]) == (0.5, (0.5, 0.5), 2)


@pytest.mark.parametrize("runs", [1, 2, 3, 5, 8])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_runs(runs: int) -> None:
    for passed in range(runs + 1):
        outcomes = [k < passed for k in range(runs)]
        for k in range(1, runs + 1):
            chosen = [any(some) for some in combinations(outcomes, k)]
            assert pass_at_k(runs, passed, k) == pytest.approx(sum(chosen) / len(chosen))


def test_pass_at_k_is_exact_for_many_runs() -> None:
    assert pass_at_k(10_000, 1, 10_000) == 1.0
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize("asked", [(4, 1, 0), (4, 1, 5), (4, 5, 1), (0, 0, 1)])
def test_pass_at_k_refuses_a_k_that_cannot_be_estimated(asked: tuple[int, int, int]) -> None:
    with fails_with(ValueError, "k must be"):
        pass_at_k(*asked)
