"""The trees of sessions in memory: as many as a budget holds. The others are in the journal alone.

A session's row is always in memory, its interactions are read when they are wanted. What nobody has
wanted for longest is let go, but never while a call of the session is under way, its lock is held,
or somebody has pinned it: then the tree that one looks at is the one that others change.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from any_agent.record import InteractionTree
from any_agent.types import Interaction
from proxy_ext.journal import Journal
from proxy_ext.sessions.delivery import DeliveryTracker
from proxy_ext.sessions.session import RecordedSession, add_to_tree

_TREE = 1_500
"""Bytes of an empty tree."""
_INTERACTION = 3_000
"""Bytes of an interaction without its tokens and texts."""
_TIMEOUT = 32
"""Trees in use that are passed over before looking again later."""
_PART = 120
"""Bytes of each part of a message."""


class _Size(NamedTuple):
    """Bytes of a tree, about."""

    recorded: int
    total: int
    """With what it keeps to be quick about the next calls."""


_NOTHING = _Size(0, 0)


class TreeCache:
    """Reads the trees of one rank's sessions, and lets them go."""

    def __init__(
        self,
        journal: Journal,
        deliveries: DeliveryTracker,
        live: Mapping[str, RecordedSession],
        *,
        budget: int,
    ) -> None:
        """``budget``: bytes, about; ``live``: the sessions that are kept in memory."""
        self._journal = journal
        self._deliveries = deliveries
        self._live = live
        self._budget = budget
        self._warm: OrderedDict[RecordedSession, _Size] = OrderedDict()
        """Live sessions with a tree, those first that were wanted longest ago."""
        self._pins: Counter[RecordedSession] = Counter()
        self._reading: dict[RecordedSession, asyncio.Task[None]] = {}
        self.bytes = 0
        """Of all trees of live sessions, about."""
        self.read = 0
        """Trees that were read from the journal."""

    def __len__(self) -> int:
        """How many live sessions have their tree in memory."""
        return len(self._warm)

    async def load(self, session: RecordedSession) -> None:
        """See to it that the session has its tree; it is there until the next `await`.

        StoreUnavailable if it cannot be read.
        """
        if session.warm:
            if session in self._warm:
                self._warm.move_to_end(session)
            return
        with self.pinned(session):
            while not session.warm:
                task = self._reading.get(session)
                if task is None:
                    task = self._reading[session] = asyncio.create_task(self._read(session))
                    task.add_done_callback(_heard)
                # Shared with whoever else wants it, who may stay when this one leaves.
                await asyncio.shield(task)

    @contextmanager
    def pinned(self, session: RecordedSession) -> Iterator[None]:
        """Its tree, once it is there, stays there meanwhile."""
        self._pins[session] += 1
        try:
            yield
        finally:
            self._pins[session] -= 1
            if not self._pins[session]:
                del self._pins[session]

    def keep(self, session: RecordedSession) -> None:
        """A session with a tree is live now."""
        self._count(session, _TREE + sum(map(_bytes, session.tree)))

    def grew(self, session: RecordedSession, interaction: Interaction) -> None:
        """Its tree has one more."""
        if session in self._warm:
            self._count(session, self._warm[session].recorded + _bytes(interaction))

    def forget(self, session: RecordedSession) -> None:
        """It is live no more: whoever still has it keeps its tree."""
        self.bytes -= self._warm.pop(session, _NOTHING).total

    # ------------------------------------------------------------------------------------------

    async def _read(self, session: RecordedSession) -> None:
        try:
            stored = await self._journal.interactions(session.id)
            if session.recovered:
                await self._deliveries.load(session)
        finally:
            del self._reading[session]
        if session.warm:
            return
        tree = InteractionTree()
        for one in stored:
            add_to_tree(tree, one)
        session.tree = tree
        self.read += 1
        if self._live.get(session.id) is session:
            self.keep(session)

    def _count(self, session: RecordedSession, recorded: int) -> None:
        size = _Size(recorded, recorded + session.tree.extra_bytes)
        self.bytes += size.total - self._warm.pop(session, _NOTHING).total
        self._warm[session] = size
        self._trim()

    def _trim(self) -> None:
        """Let go what nobody has wanted for longest, until the rest fits."""
        passed_over = 0
        while self.bytes > self._budget and self._warm and passed_over < _TIMEOUT:
            session, size = self._warm.popitem(last=False)
            if session.calls or session.lock.locked() or session in self._pins:
                # In use, so it is as good as new.
                self._warm[session] = size
                passed_over += 1
            else:
                session.cool()
                self.bytes -= size.total


def _heard(task: asyncio.Task[None]) -> None:
    """Whoever waited for it may have gone: its error is told to nobody then."""
    if not task.cancelled():
        task.exception()


def _bytes(interaction: Interaction) -> int:
    """About what an interaction takes in memory."""
    i = interaction
    arrays = (i.prompt_delta_ids, i.output_ids, i.output_logprobs, i.output_versions)
    said = _size([*i.message_delta, i.output_message, i.tools, i.request, i.gconfig.grammar])
    return _INTERACTION + sum(array.nbytes for array in arrays) + said


def _size(value: Any) -> int:
    """About what plain data takes, without recursion."""
    size, left = 0, [value]
    while left:
        part = left.pop()
        size += _PART
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
    return size
