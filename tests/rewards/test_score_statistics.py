"""Means, intervals and pass@k against what is known of them."""

from __future__ import annotations

import math
from itertools import combinations, product

import pytest

from any_agent.rewards.score_statistics import estimate, pass_at_k, student975
from tests.support.errors import fails_with


def test_students_quantiles_are_those_of_tables() -> None:
    """As tables have them (scipy.stats.t.ppf(0.975, freedom))."""
    table = {1: 12.7062, 3: 3.1824, 30: 2.0423, 31: 2.0395, 60: 2.0003, 1000: 1.9623}
    table[10**9] = 1.959964
    found = {freedom: student975(freedom) for freedom in table}
    assert found == pytest.approx(table, abs=6e-5)
    quantiles = [student975(n) for n in range(1, 2000)]
    assert quantiles == sorted(quantiles, reverse=True)


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


def test_pass_at_k_is_the_mean_over_all_choices_of_k_runs() -> None:
    for runs in (1, 2, 3, 5, 8):
        for passed, k in product(range(runs + 1), range(1, runs + 1)):
            chosen = [any(some) for some in combinations([n < passed for n in range(runs)], k)]
            assert pass_at_k(runs, passed, k) == pytest.approx(sum(chosen) / len(chosen))


def test_pass_at_k_is_exact_for_many_runs_and_refuses_what_cannot_be_estimated() -> None:
    assert pass_at_k(10_000, 1, 10_000) == 1.0
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    for asked in ((4, 1, 0), (4, 1, 5), (4, 5, 1), (0, 0, 1)):
        with fails_with(ValueError, "k must be"):
            pass_at_k(*asked)
