"""`CapacityKeeper`: limits the train sessions that ranks may admit, so that their sum is never
exceeded.

A rank's limit is a total over its whole life, so lost and repeated messages do no harm; a late one
is recognized by its number. To move headroom from one rank to another, the limit of the first is
lowered, its reply read, and only then the limit of the other raised. A rank that does not reply
keeps the headroom that it may have, and the others share the rest until it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import count

from any_agent.config import RolloutConfig
from any_agent.errors import AnyAgentError
from any_agent.protocol.training import Capacity
from any_agent.rollout.admission import RankView, divide, total
from any_agent.rollout.rank_clients import RANK_ENDED, RankClients

log = logging.getLogger(__name__)

_TTL = 15.0  # seconds after its last message until a rank admits nothing more
_INTERVAL = 1.0
ANSWER_TIMEOUT = 1.0  # seconds for which the other ranks wait for one rank's reply
_RETRY_FOR = 5.0  # seconds for which one message is repeated; the next one has the newest leases


class _RankConnection:
    """The limits sent to one rank, and its last reply; one message at a time is under way."""

    def __init__(self, *, added: bool = False) -> None:
        self.added = added
        """The rank was added later, and has nothing until its first reply."""
        self.now: Capacity | None = None
        self.limit = 0
        """The highest limit that may be in force: until a reply, any that was sent since the last
        one."""
        self.task: asyncio.Task[None] | None = None
        self.failed = False
        self.late = False
        """True if the other ranks no longer wait for the reply to the present message."""
        self.answered_late = False
        """True if such a late reply came since the last round."""

    @property
    def away(self) -> bool:
        return self.failed or (self.task is not None and not self.task.done())


class CapacityKeeper:
    """Sets every rank's limit after each event ``changed``, and at regular intervals.

    While ``open`` is False it admits nothing, but still renews the ``held`` leases.
    """

    def __init__(
        self,
        ranks: RankClients,
        config: RolloutConfig,
        *,
        owner: str,
        held: Callable[[int], list[str]],
    ) -> None:
        self._ranks = ranks
        self._config = config
        self._owner = owner
        self._held = held
        self._connections = {rank: _RankConnection() for rank in ranks.present}
        self._numbers = count(1)
        self._turn = 0
        self.open = False
        self.admits = False
        """True once the ranks' limits have been set as for an open one."""
        self.changed = asyncio.Event()

    @property
    def now(self) -> Capacity | None:
        """The sum of all ranks' last replies; None before each rank has replied."""
        views = self._views()
        return total([*views.values()]) if views is not None else None

    async def run(self) -> None:
        """Run until cancelled; raise a rank's error if it is not retryable."""
        try:
            while True:
                self.changed.clear()
                await self.round()
                try:
                    async with asyncio.timeout(_INTERVAL):
                        await self.changed.wait()
                except TimeoutError:
                    pass
        finally:
            for connection in self._connections.values():
                if connection.task is not None:
                    connection.task.cancel()

    async def round(self) -> None:
        """Refresh every rank's view, lower limits that are too high, then raise others."""
        was_open = self.open
        self._follow_fleet()
        # After a second message, a rank that always replies late would be away at each division.
        refreshed = {
            rank: connection.limit
            for rank, connection in self._connections.items()
            if not connection.answered_late
        }
        for connection in self._connections.values():
            connection.answered_late = False
        await self._send_limits(refreshed)
        views = self._views()
        if views is None:
            # A rank that has never replied may have any number of sessions.
            return
        rooms, _ = self._divide(views)
        await self._send_limits(
            {
                rank: view.now.admitted + room
                for (rank, view), room in zip(views.items(), rooms, strict=True)
                if room < view.headroom
            }
        )
        views = self._views() or views
        rooms, self._turn = self._divide(views)
        spare = sum(rooms) - sum(view.headroom for view in views.values() if not view.away)
        raised = {}
        for (rank, view), room in zip(views.items(), rooms, strict=True):
            more = min(spare, room - view.headroom)
            if more > 0 and not view.away:
                spare -= more
                raised[rank] = view.now.admitted + view.headroom + more
        await self._send_limits(raised)
        self.admits = was_open

    def _follow_fleet(self) -> None:
        """Add the ranks that are new, and forget those that have ended."""
        present = self._ranks.present
        for rank in self._connections.keys() - present:
            if (task := self._connections.pop(rank).task) is not None:
                task.cancel()
        for rank in present:
            self._connections.setdefault(rank, _RankConnection(added=True))

    def _divide(self, views: dict[int, RankView]) -> tuple[list[int], int]:
        if not self.open:
            return [0] * len(views), self._turn
        return divide([*views.values()], self._config, self._turn)

    def _views(self) -> dict[int, RankView] | None:
        views = {}
        for rank, connection in self._connections.items():
            if connection.now is not None:
                serves = self._ranks.fleet.state(rank) == "serving"
                now, limit, away = connection.now, connection.limit, connection.away
                views[rank] = RankView(now, limit, away, serves=serves)
            elif not connection.added:
                return None
        return views

    async def _send_limits(self, limits: Mapping[int, int]) -> None:
        """Send the limits to the ranks that have replied to the previous message."""
        sent = []
        for rank, limit in limits.items():
            connection = self._connections[rank]
            if connection.task is None or connection.task.done():
                connection.task = asyncio.create_task(self._send_limit(rank, connection, limit))
                sent.append(connection.task)
        late = (await asyncio.wait(sent, timeout=ANSWER_TIMEOUT))[1] if sent else ()
        for connection in self._connections.values():
            connection.late = connection.late or connection.task in late
            if connection.task is not None and connection.task.done():
                connection.task.result()

    async def _send_limit(self, rank: int, connection: _RankConnection, limit: int) -> None:
        connection.limit = max(connection.limit, limit)
        connection.late = False
        try:
            connection.now = await self._ranks.clients[rank].set_capacity(
                limit=limit,
                ttl=_TTL,
                owner=self._owner,
                held=self._held(rank),
                number=next(self._numbers),
                retry_for=_RETRY_FOR,
            )
        except AnyAgentError as error:
            if not (error.retryable or error.code == RANK_ENDED):
                raise
            log.warning("rank %d has not accepted its capacity: %s", rank, error.message)
            connection.failed = True
            return
        connection.limit = max(limit, connection.now.limit)
        connection.failed = False
        if connection.late:
            connection.answered_late = True
            self.changed.set()
