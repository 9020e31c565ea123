"""The choice among the sessions of an export: the best ones of each group, or pairs of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from any_agent.record import session_score
from proxy_ext.export.reader import Credited

ENDED = ("finalized", "leased", "trained", "rejected")
"""The states of training sessions that have ended with a reward."""


def is_candidate(session: Mapping[str, Any], states: Sequence[str] | None) -> bool:
    """Return whether a session may be chosen: by default a training session that has ended.

    ``states`` are those that were asked for. A session with a veto is never chosen.
    """
    if is_vetoed(session):
        return False
    return bool(states) or (session["mode"] == "train" and session["state"] in ENDED)


def is_vetoed(session: Mapping[str, Any]) -> bool:
    """Return whether a session may not be trained on because of a veto."""
    return str(session["reason"] or "").startswith("vetoed")


def group_of(session: Mapping[str, Any], session_id: str) -> str:
    """Return a name of a session's group, else of its task's sessions, else its own id."""
    return str(session["group_id"] or session["task_id"] or session_id)


class Scored(NamedTuple):
    session_id: str
    score: float


class Pair(NamedTuple):
    chosen: Scored
    rejected: Scored


class Groups:
    """The scores of sessions by group; a few hundred bytes for each session."""

    def __init__(self) -> None:
        self._groups: defaultdict[str, list[Scored]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, session: Mapping[str, Any], score: float) -> None:
        """Add a session to its group, else to its task's sessions, else alone."""
        self._groups[group_of(session, session["id"])].append(Scored(session["id"], score))

    def best(self, count: int) -> set[str]:
        """Return the ids of so many sessions of each group, the earlier one of equal scores."""
        return {one.session_id for group in self._sorted() for one in group[:count]}

    def pairs(self, count: int, margin: float) -> Iterator[Pair]:
        """Yield the best with the worst session of each group, the second best with the second
        worst, and so on, as long as their scores differ by at least ``margin``."""
        for group in self._sorted():
            for better, worse in list(zip(group, reversed(group), strict=True))[:count]:
                if better.score > worse.score and better.score - worse.score >= margin:
                    yield Pair(better, worse)

    def _sorted(self) -> Iterator[list[Scored]]:
        for group in self._groups.values():
            yield sorted(group, key=lambda one: -one.score)


def score_of(found: Credited) -> float | None:
    """Return a session's score; None without a reward, or without a call that training counts."""
    return session_score(found.tree, found.rewards) if found.rewarded else None


def reward_of(session: Mapping[str, Any], found: Credited) -> float | None:
    """Return a session's final reward, else its score."""
    final: float | None = session["final_reward"]
    return score_of(found) if final is None else final
