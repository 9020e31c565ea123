"""The content of a group's page: its prompt once, and its sessions' last answers side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from any_agent.errors import AnyAgentError, NotFound
from router.dashboard.ranks import RankReader, Visitor, reward_unknown
from router.dashboard.trajectory import Message, Turn, turns_of

MOST = 16
"""Sessions that are shown beside each other."""
_LOOKS = 10
"""Pages of sessions that are looked through for them."""
_SAME = 1e-8  # as the trainer takes scores for equal


@dataclass(frozen=True, slots=True)
class Member:
    """One session of the group."""

    info: Mapping[str, Any]
    last: Turn | None
    """Its latest call; None before the first one."""
    problem: str = ""
    """The reason why its call is not shown; "" where it is."""
    score: float | None = None
    """Its reward in training; None before a call that counts."""


@dataclass(frozen=True, slots=True)
class GroupPage:
    """One group, as its page shows it."""

    id: str
    prompt: Sequence[Message]
    """The messages of a first call; empty where none can be read."""
    members: Sequence[Member]
    """The best reward first; those without a reward are last."""
    more: bool
    """True if it has sessions that are not shown."""
    missing: Sequence[int]
    """The ranks that did not answer."""

    @property
    def unknown(self) -> int:
        """The number of sessions whose own rewards went with their content: to an archive."""
        return sum(reward_unknown(member.info) for member in self.members)

    @property
    def rewards(self) -> Sequence[float]:
        return [m.info["reward"] for m in self.members if m.info["reward"] is not None]

    @property
    def mean(self) -> float | None:
        return mean(self.rewards) if self.rewards else None

    @property
    def alike(self) -> bool:
        """True if several sessions have rewards, all of one score, and all sessions are known."""
        rewarded = [m for m in self.members if m.info["reward"] is not None]
        known = not self.more and not self.missing and not self.unknown
        scores = [m.info["reward"] if m.score is None else m.score for m in rewarded]
        return known and len(scores) > 1 and same(scores)


def same(scores: Sequence[float]) -> bool:
    """Return whether the trainer takes scores for equal."""
    return max(scores) - min(scores) <= _SAME * max(1.0, *map(abs, scores))


async def read_group(
    ranks: RankReader, visitor: Visitor, group_id: str, tenant: str = ""
) -> GroupPage:
    """Return a group's sessions, an operator's of that ``tenant`` or of none.

    NotFound for a group without one that the visitor may see.
    """
    sessions, more, missing = await sessions_of(ranks, visitor, group_id, tenant, MOST)
    if not sessions and not missing:
        raise NotFound(f"there is no session of a group {group_id[:80]}")
    members = await asyncio.gather(*(_member(ranks, visitor, info) for info in sessions))
    prompt = await _prompt(ranks, visitor, members)
    best_first = sorted(members, key=_place)
    return GroupPage(group_id, prompt, best_first, more, missing)


async def sessions_of(
    ranks: RankReader, visitor: Visitor, group_id: str, tenant: str, most: int
) -> tuple[list[Mapping[str, Any]], bool, list[int]]:
    """Return at most so many sessions of a group, whether it has more, and the ranks that did not
    answer."""
    query = {"group_id": group_id, "limit": str(most), **({"tenant": tenant} if tenant else {})}
    sessions: list[Mapping[str, Any]] = []
    missing: set[int] = set()
    after = ""
    for _ in range(_LOOKS):
        page = await ranks.sessions(visitor, {**query, "after": after} if after else query)
        sessions += page.sessions
        missing.update(page.missing)
        after = page.after
        if not after or len(sessions) >= most:
            break
    return sessions[:most], bool(after) or len(sessions) > most, sorted(missing)


async def _member(ranks: RankReader, visitor: Visitor, info: Mapping[str, Any]) -> Member:
    try:
        last = max(0, info["interactions"] - 1)
        turn, score = await _turn(ranks, visitor, info["session_id"], last)
    except AnyAgentError as error:
        return Member(info, None, error.message)
    return Member(info, turn, score=score)


async def _prompt(
    ranks: RankReader, visitor: Visitor, members: Sequence[Member]
) -> Sequence[Message]:
    for member in members:
        if member.last is not None and member.last.call["number"] == 1:
            return member.last.messages
    for member in members:
        if member.last is not None:
            try:
                first, _ = await _turn(ranks, visitor, member.info["session_id"], 0)
            except AnyAgentError:
                break
            return first.messages if first is not None else ()
    return ()


async def _turn(
    ranks: RankReader, visitor: Visitor, session_id: str, start: int
) -> tuple[Turn | None, float | None]:
    """Return a call by its place, or the last one before it, as frozen models' calls are counted
    and not shown; and the session's score."""
    page = await ranks.of_session(visitor, session_id, "/interactions", start=start, limit=1)
    last = int(page["total"]) - 1
    if 0 <= last < start:
        page = await ranks.of_session(visitor, session_id, "/interactions", start=last, limit=1)
    turns = turns_of(page["interactions"], ())
    return turns[0] if turns else None, page["score"]


def _place(member: Member) -> tuple[bool, float, float]:
    reward = member.info["reward"]
    return reward is None, -(reward or 0.0), -(member.score or 0.0)
