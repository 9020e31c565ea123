"""Ids `<task>-<rank>-<n>`, of sessions opened under the names of the AReaL documents."""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakValueDictionary

from proxy_ext.journal import Journal

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
