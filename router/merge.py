"""Several ranks' answers as one: pure functions of what they said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Answers = dict[int, Any]
"""Each rank's JSON."""


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


def newest(answers: Answers, limit: int) -> list[Any]:
    """Sessions of all ranks, newest first."""
    found = [session for answer in answers.values() for session in answer]
    found.sort(key=lambda session: session["created_at"], reverse=True)
    return found[:limit]


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
