"""Names of sessions and of tasks' groups, and the sampling seeds of calls.

Random; or, where a run is to be repeated bit for bit, derived from the run's seed, the rank, and
the member's number in its group. Members of other groups, and when they come, have no part in it.
A session without a group is named by how many of them there were here before. The trainer orders
its batches by these names.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Container
from hashlib import sha256
from weakref import WeakValueDictionary

from any_agent.config import Config
from any_agent.keys import SESSION_ID_PREFIX
from proxy_ext.journal import Journal


class SessionIds:
    """Names of one rank. ``seed`` None: random ones, and no sampling seeds."""

    def __init__(self, rank: int, seed: int | None = None) -> None:
        self._rank = rank
        self._seed = seed
        self._single = f"{SESSION_ID_PREFIX}{rank}-{self._hex(8, 'single')}"
        self._singles = 0
        self._generations: dict[str, int] = {}
        """How many generations each task had."""

    @classmethod
    async def recover(cls, config: Config, rank: int, journal: Journal) -> SessionIds:
        """Go on after the sessions that the journal has."""
        if not config.rollout.deterministic:
            return cls(rank)
        names = cls(rank, config.train.seed)
        last = await journal.last_session(names._single)
        if last is not None:
            names._singles = int(last.removeprefix(names._single), 16) + 1
        for group_id in await journal.group_ids():
            names._begun(group_id)
        return names

    def single(self) -> str:
        """A new session's id that has no group."""
        if self._seed is None:
            return f"{SESSION_ID_PREFIX}{self._rank}-{secrets.token_hex(8)}"
        # The number itself is in it, so the journal's last one tells how many there were.
        name = f"{self._single}{self._singles:08x}"
        self._singles += 1
        return name

    def member(self, group_id: str, number: int) -> str:
        """A new session's id, by its number among those of its group."""
        if self._seed is None:
            return self.single()
        self._begun(group_id)
        return f"{SESSION_ID_PREFIX}{self._rank}-{self._hex(16, 'member', group_id, number)}"

    def generation(self, task_id: str, taken: Container[str]) -> str:
        """A new group of a task; none that is ``taken``.

        A generation counts once a member is named: how often somebody waited for slots in vain is
        a matter of time.
        """
        number = self._generations.get(task_id, 0)
        while True:
            part = secrets.token_hex(4) if self._seed is None else f"{self._rank}-{number}"
            name = f"{task_id}~{part}"
            if name not in taken:
                return name
            number += 1

    def sampling_seed(self, session_id: str, number: int) -> int | None:
        """The seed of a session's call, by its number among the session's interactions."""
        part = self._hex(8, "call", session_id, number)
        return int(part, 16) >> 1 if part else None

    def _begun(self, group_id: str) -> None:
        task_id, _, end = group_id.rpartition(f"~{self._rank}-")
        if end.isdecimal():
            self._generations[task_id] = max(self._generations.get(task_id, 0), int(end) + 1)

    def _hex(self, digits: int, *of: object) -> str:
        """Digits that follow from the seed; none without one."""
        if self._seed is None:
            return ""
        text = "\0".join(map(str, (self._seed, self._rank, *of)))
        return sha256(text.encode()).hexdigest()[:digits]


_KEPT = 4096
"""Tasks whose next number is at hand; that of another one is read from the journal."""


class TaskNumbers:
    """Counts the sessions of one task. Kept by whoever gives a name until it is in the journal."""

    def __init__(self, prefix: str, first: int) -> None:
        self._prefix = prefix
        self._next = first

    def new(self) -> str:
        """A new session's id."""
        name = f"{self._prefix}{self._next}"
        self._next += 1
        return name


class ArealIds:
    """The tasks of one rank; numbers go on after those that the journal has."""

    def __init__(self, journal: Journal, rank: int) -> None:
        self._journal = journal
        self._rank = rank
        self._recent: OrderedDict[str, TaskNumbers] = OrderedDict()
        self._used: WeakValueDictionary[str, TaskNumbers] = WeakValueDictionary()
        """With those that are no longer recent, while somebody has them."""

    async def of(self, task: str) -> TaskNumbers:
        numbers = self._used.get(task)
        if numbers is None:
            prefix = f"{task}-{self._rank}-"
            last = await self._journal.last_number(prefix)
            numbers = TaskNumbers(prefix, 0 if last is None else last + 1)
            # Another open of this task may have been here meanwhile.
            numbers = self._used.setdefault(task, numbers)
        self._recent[task] = numbers
        self._recent.move_to_end(task)
        if len(self._recent) > _KEPT:
            self._recent.popitem(last=False)
        return numbers
