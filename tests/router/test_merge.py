"""Lists of several ranks as one: each session once, newest first, whatever the pages are."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.fanout import newest

Ranks = list[list[float]]


def page(times: list[float], before: int | None, limit: int) -> tuple[list[Any], int | None]:
    """As a rank answers: numbers below ``before``, the highest first."""
    before = len(times) + 1 if before is None else before
    numbers = range(min(before - 1, len(times)), 0, -1)[:limit]
    lines = [{"number": n, "created_at": times[n - 1]} for n in numbers]
    lowest = lines[-1]["number"] if len(lines) == limit else 1
    return lines, lowest if lowest > 1 else None


@given(
    ranks=st.lists(st.lists(st.floats(0, 9), max_size=9), min_size=1, max_size=3),
    limit=st.integers(1, 9),
)
def test_pages_hold_each_session_once(ranks: Ranks, limit: int) -> None:
    # A clock that is set back puts no session of a rank before a newer one of it.
    places: dict[int, int] | None = {}
    found: list[tuple[int, int]] = []
    for _ in range(100):
        assert places is not None
        answers, ends = {}, {}
        for rank, times in enumerate(ranks):
            answers[rank], ends[rank] = page(times, places.get(rank), limit)
            for each in answers[rank]:
                each["rank"] = rank
        shown, places = newest(answers, ends, places, limit)
        assert len(shown) <= limit
        found += [(each["rank"], each["number"]) for each in shown]
        if places is None:
            break
    expected = {(r, n + 1) for r, times in enumerate(ranks) for n in range(len(times))}
    assert len(found) == len(expected) and set(found) == expected
    for rank in range(len(ranks)):
        mine = [number for owner, number in found if owner == rank]
        assert mine == sorted(mine, reverse=True)


def test_a_rank_that_is_away_is_asked_for_the_same_again() -> None:
    lines = [{"number": 3, "created_at": 3.0}, {"number": 2, "created_at": 2.0}]
    shown, places = newest({0: lines}, {0: 2}, {0: 4, 1: 7}, 9)
    assert [each["number"] for each in shown] == [3, 2]
    assert places == {0: 2, 1: 7}
