"""Statistics of the scores of repeated runs on a dataset's items: means, intervals, pass@k.

The items are the sample: runs of one item are alike, so more runs do not narrow an interval as more
items do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_T975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""The 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom."""
_Z975 = 1.959964


class Estimate(NamedTuple):
    """A mean over items with its 95 % confidence interval over the choice of items, which is None
    for fewer than two items."""

    mean: float
    interval: tuple[float, float] | None
    items: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of one value per item with Student's interval; None without any value.

    Where all values lie between 0 and 1, as probabilities and most rewards do, the interval is cut
    there: Student's of few items is far wider.
    """
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean, None, count)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = student975(count - 1) * math.sqrt(variance / count)
    low, high = mean - half, mean + half
    if min(values) >= 0.0 and max(values) <= 1.0:
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean, (low, high), count)


def student975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t to 4 digits, from a table, then by Fisher's
    expansion in 1/n (Abramowitz and Stegun, 26.7.5)."""
    if freedom <= len(_T975):
        return _T975[freedom - 1]
    z = _Z975
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def pass_at_k(runs: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k runs passes:
    1 - C(runs - passed, k) / C(runs, k) (Chen et al. 2021, arXiv:2107.03374).

    Raises ValueError unless 1 <= k <= runs and 0 <= passed <= runs.
    """
    if not (1 <= k <= runs and 0 <= passed <= runs):
        raise ValueError(f"pass@{k} of {passed} in {runs} runs: k must be 1 to {runs}")
    return 1.0 - math.comb(runs - passed, k) / math.comb(runs, k)
