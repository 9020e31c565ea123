"""Several ranks' answers as one: pure functions of what they said."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Any

Answers = dict[int, Any]
"""Each rank's JSON."""
_NOTHING = 1


def sums(answers: Answers) -> dict[str, int]:
    """The counts of all ranks together, under the names that each uses."""
    totals: dict[str, int] = {}
    for answer in answers.values():
        for name, value in answer.items():
            if isinstance(value, int):
                totals[name] = totals.get(name, 0) + value
    return totals


def lowest_version(answers: Answers) -> dict[str, Any]:
    """What the rank says that is furthest behind: what all of them have reached."""
    return dict(min(answers.values(), key=lambda answer: answer["version"]))


def newest(
    answers: Answers, ends: Mapping[int, int | None], given: Mapping[int, int], limit: int
) -> tuple[list[Any], dict[int, int] | None]:
    """Sessions of all ranks, newest first, and where the next page begins; None on the last one.

    ``ends`` is where each rank's own next page begins, ``given`` where this one did. A rank that
    did not answer is asked for the same again.
    """
    lists = [[(rank, session) for session in answer] for rank, answer in answers.items()]
    in_order = heapq.merge(*lists, key=lambda item: item[1]["created_at"], reverse=True)
    shown = list(itertools.islice(in_order, limit))
    places = dict(given)
    more = False
    for rank, answer in answers.items():
        of_rank = [session for owner, session in shown if owner == rank]
        if len(of_rank) < len(answer):
            more = True
            if of_rank:
                places[rank] = of_rank[-1]["number"]
        else:
            end = ends.get(rank)
            more = more or end is not None
            # Below the first number there is none.
            places[rank] = _NOTHING if end is None else end
    return [session for _, session in shown], places if more else None


def split(items: Any, rank_of: Callable[[Any], int | None]) -> dict[int, list[Any]] | None:
    """Items by rank, in their order; None unless they are a list that all have one."""
    if not isinstance(items, list):
        return None
    out: dict[int, list[Any]] = {}
    for item in items:
        rank = rank_of(item)
        if rank is None:
            return None
        out.setdefault(rank, []).append(item)
    return out
