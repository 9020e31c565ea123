"""The trees of live sessions in memory, within a budget. The others are in the journal alone.

A session's row is always in memory, its interactions are read on demand. The tree that was used
longest ago is unloaded first, but never while a call of the session is under way, its lock is held,
or it is pinned: so all users of a tree share one object.
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

_TREE_BYTES = 1_500  # of an empty tree
_INTERACTION_BYTES = 3_000  # of an interaction without its tokens and texts
_PART_BYTES = 120  # of each part of a message
_MAX_SKIPPED = 32  # trees in use that one trim passes over


class _Size(NamedTuple):
    """An estimate of a tree's bytes."""

    recorded: int
    total: int
    """The bytes including the caches that make the next calls quick."""


_NOTHING = _Size(0, 0)


class TreeCache:
    """Loads and unloads the trees of one rank's sessions."""

    def __init__(
        self,
        journal: Journal,
        deliveries: DeliveryTracker,
        live: Mapping[str, RecordedSession],
        *,
        budget: int,
    ) -> None:
        """``budget``: bytes, about; ``live``: the sessions whose trees count."""
        self._journal = journal
        self._deliveries = deliveries
        self._live = live
        self.budget = budget
        """Bytes, about, up to which trees stay loaded."""
        self._loaded: OrderedDict[RecordedSession, _Size] = OrderedDict()
        """Live sessions with a tree, least recently used first."""
        self._pins: Counter[RecordedSession] = Counter()
        self._reading: dict[RecordedSession, asyncio.Task[None]] = {}
        self.bytes = 0
        """Estimated bytes of all trees of live sessions."""
        self.reads = 0
        """Number of trees that were read from the journal."""

    def __len__(self) -> int:
        """Return the number of live sessions with a tree in memory."""
        return len(self._loaded)

    async def load(self, session: RecordedSession) -> None:
        """Load the session's tree, which stays in memory until the next `await`.

        StoreUnavailable if it cannot be read.
        """
        if session.loaded:
            if session in self._loaded:
                self._loaded.move_to_end(session)
            return
        with self.pinned(session):
            while not session.loaded:
                task = self._reading.get(session)
                if task is None:
                    task = self._reading[session] = asyncio.create_task(self._read(session))
                    task.add_done_callback(_retrieve_error)
                # Shielded: other callers share the task.
                await asyncio.shield(task)

    @contextmanager
    def pinned(self, session: RecordedSession) -> Iterator[None]:
        """Keep its tree in memory, once it is loaded."""
        self._pins[session] += 1
        try:
            yield
        finally:
            self._pins[session] -= 1
            if not self._pins[session]:
                del self._pins[session]

    def add(self, session: RecordedSession) -> None:
        """Count a loaded session that is live now."""
        self._count(session, _TREE_BYTES + sum(map(_bytes, session.tree)))

    def add_interaction(self, session: RecordedSession, interaction: Interaction) -> None:
        """Count one more interaction of a tree."""
        if session in self._loaded:
            self._count(session, self._loaded[session].recorded + _bytes(interaction))

    def remove(self, session: RecordedSession) -> None:
        """Stop counting a session that is not live any more; its tree stays with its users."""
        self.bytes -= self._loaded.pop(session, _NOTHING).total

    async def _read(self, session: RecordedSession) -> None:
        try:
            stored = await self._journal.interactions(session.id)
            if session.recovered:
                await self._deliveries.load(session)
        finally:
            del self._reading[session]
        if session.loaded:
            return
        tree = InteractionTree()
        for one in stored:
            add_to_tree(tree, one)
        session.tree = tree
        self.reads += 1
        if self._live.get(session.id) is session:
            self.add(session)

    def _count(self, session: RecordedSession, recorded: int) -> None:
        size = _Size(recorded, recorded + session.tree.extra_bytes)
        self.bytes += size.total - self._loaded.pop(session, _NOTHING).total
        self._loaded[session] = size
        self.trim()

    def trim(self) -> None:
        """Unload the least recently used trees until the rest fits the budget."""
        skipped = 0
        while self.bytes > self.budget and self._loaded and skipped < _MAX_SKIPPED:
            session, size = self._loaded.popitem(last=False)
            if session.calls or session.lock.locked() or session in self._pins:
                # In use, so it counts as just used.
                self._loaded[session] = size
                skipped += 1
            else:
                session.unload()
                self.bytes -= size.total


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Retrieve the error, so that asyncio does not log it if every waiter has left."""
    if not task.cancelled():
        task.exception()


def _bytes(interaction: Interaction) -> int:
    """Return the estimated bytes of an interaction in memory."""
    i = interaction
    arrays = (i.prompt_delta_ids, i.output_ids, i.output_logprobs, i.output_versions)
    texts = _size([*i.message_delta, i.output_message, i.tools, i.request, i.gconfig.grammar])
    return _INTERACTION_BYTES + sum(array.nbytes for array in arrays) + texts


def _size(value: Any) -> int:
    """Return the estimated bytes of plain data, without recursion."""
    size, left = 0, [value]
    while left:
        part = left.pop()
        size += _PART_BYTES
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
    return size
