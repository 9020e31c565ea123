"""Ids of sessions and of tasks' groups, and the sampling seeds of calls.

They are random; or, where a run is to be repeated bit for bit, derived from the run's seed, the
rank, and the member's number in its group. Other groups and times of arrival have no part in it. A
session without a group is numbered after those that this rank had before. The trainer orders its
batches by these ids.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Container, Generator
from hashlib import sha256
from weakref import WeakValueDictionary

from any_agent.config import Config
from any_agent.keys import SESSION_ID_PREFIX
from proxy_ext.journal import Journal


class SessionIds:
    """Makes the ids of one rank. ``seed`` None: random ids, and no sampling seeds.

    ``tag``: `server.lane_tag`, by which a service of several runs knows whose a session is.
    """

    def __init__(self, rank: int, seed: int | None = None, tag: str = "") -> None:
        self._rank = rank
        self._seed = seed
        self._prefix = f"{SESSION_ID_PREFIX}{rank}-{tag}"
        self._single = f"{self._prefix}{self._hex(8, 'single')}"
        self._singles = 0
        self._generations: dict[str, int] = {}
        """Number of generations that each task had."""

    @classmethod
    async def recover(cls, config: Config, rank: int, journal: Journal) -> SessionIds:
        """Continue after the sessions that the journal has."""
        tag = config.server.lane_tag or ""
        if not config.rollout.deterministic:
            return cls(rank, tag=tag)
        ids = cls(rank, config.train.seed, tag)
        last = await journal.last_session(ids._single)
        if last is not None:
            ids._singles = int(last.removeprefix(ids._single), 16) + 1
        for group_id in await journal.group_ids():
            ids._count_generation(group_id)
        return ids

    def new_session(self) -> str:
        """Return the id of a new session without a group."""
        if self._seed is None:
            return f"{self._prefix}{secrets.token_hex(8)}"
        # The id holds the number, so the journal's last id gives their count.
        name = f"{self._single}{self._singles:08x}"
        self._singles += 1
        return name

    def new_member(self, group_id: str, number: int) -> str:
        """Return the id of a new session, by its number in its group."""
        if self._seed is None:
            return self.new_session()
        self._count_generation(group_id)
        return f"{self._prefix}{self._hex(16, 'member', group_id, number)}"

    def new_generation(self, task_id: str, taken: Container[str]) -> str:
        """Return the id of a task's next group, which is not among the ``taken`` ones.

        A generation counts once it has a member: how often an open waited for slots in vain depends
        on timing.
        """
        number = self._generations.get(task_id, 0)
        while True:
            part = secrets.token_hex(4) if self._seed is None else f"{self._rank}-{number}"
            name = f"{task_id}~{part}"
            if name not in taken:
                return name
            number += 1

    def sampling_seed(self, session_id: str, number: int) -> int | None:
        """Return a call's seed by its number in the session; None in a run without a seed."""
        # Without the tag, so that two runs of a service, with one seed, sample alike.
        own = session_id.removeprefix(self._prefix)
        name = session_id if own == session_id else f"{SESSION_ID_PREFIX}{self._rank}-{own}"
        part = self._hex(8, "call", name, number)
        return int(part, 16) >> 1 if part else None

    def _count_generation(self, group_id: str) -> None:
        task_id, _, end = group_id.rpartition(f"~{self._rank}-")
        if end.isdecimal():
            self._generations[task_id] = max(self._generations.get(task_id, 0), int(end) + 1)

    def _hex(self, digits: int, *of: object) -> str:
        """Return digits derived from the seed; an empty text without one."""
        if self._seed is None:
            return ""
        text = "\0".join(map(str, (self._seed, self._rank, *of)))
        return sha256(text.encode()).hexdigest()[:digits]


_MAX_CACHED = 4096  # opens whose task's next number is in memory; others' are in the journal


class ArealIds:
    """Ids `<task>-<rank>-<n>` of sessions opened under the names of the AReaL documents.

    The numbers of each task continue after those that the journal has. An open keeps its task's
    iterator until the new id is in the journal.
    """

    def __init__(self, journal: Journal, rank: int) -> None:
        self._journal = journal
        self._rank = rank
        self._ids: WeakValueDictionary[str, Generator[str]] = WeakValueDictionary()
        """The iterators in use, and those of the last opens."""
        self._recent: deque[Generator[str]] = deque(maxlen=_MAX_CACHED)

    async def ids_of(self, task: str) -> Generator[str]:
        """Return the iterator over a task's next ids."""
        ids = self._ids.get(task)
        if ids is None:
            prefix = f"{task}-{self._rank}-"
            last = await self._journal.last_number(prefix)
            first = 0 if last is None else last + 1
            # Another open of this task may have read the journal meanwhile.
            ids = self._ids.setdefault(task, (f"{prefix}{n}" for n in itertools.count(first)))
        self._recent.append(ids)
        return ids
