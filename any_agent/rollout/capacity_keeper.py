"""Telling the ranks how many train sessions they may admit, so that the sum is never exceeded.

A rank is told a total, "this many ever", so a message that is lost or repeated harms nothing; one
that comes late is known by its number. To move head-room from one rank to another, the one's limit
is lowered, its answer read, and only then the other's raised. A rank that does not answer keeps
what it may have: the others make do with the rest until it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from itertools import count

from any_agent.config import RolloutConfig
from any_agent.errors import AnyAgentError
from any_agent.protocol.rl import Capacity
from any_agent.rollout.rank_clients import RankClients
from any_agent.rollout.slot_allocation import RankView, divide, total

log = logging.getLogger(__name__)

_TTL = 15.0
"""Seconds after which a rank admits nothing more if it hears nothing more."""
_INTERVAL = 1.0
_ANSWER_TIMEOUT = 1.0
"""Seconds that the others wait for one rank's answer."""
_RETRY_FOR = 5.0
"""Seconds that one message is repeated; then a new one says what is held by now."""


class _RankConnection:
    """What was said to one rank, and what it said. One message at a time is under way."""

    def __init__(self) -> None:
        self.now: Capacity | None = None
        self.limit = 0
        """The highest that may be in force: as long as a message is not answered, any that was
        sent since the last answer."""
        self.task: asyncio.Task[None] | None = None
        self.failed = False
        self.late = False
        """The others wait no longer for the answer to what it is told now."""
        self.news = False
        """Such an answer came since the last round."""

    @property
    def away(self) -> bool:
        return self.failed or (self.task is not None and not self.task.done())


class CapacityKeeper:
    """Sets every rank's limit again when something ``changed``, and regularly.

    Closed (at first) it admits nothing, but renews the leases of what is ``held``.
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
        self._talks = [_RankConnection() for _ in range(len(ranks))]
        self._numbers = count(1)
        self._turn = 0
        self.open = False
        self.changed = asyncio.Event()

    @property
    def now(self) -> Capacity | None:
        """All ranks as one, as they answered last; None before each did."""
        views = self._views()
        return total(views) if views is not None else None

    async def run(self) -> None:
        """Until cancelled. Raises what a rank answered that will not get better."""
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
            for talk in self._talks:
                if talk.task is not None:
                    talk.task.cancel()

    async def round(self) -> None:
        """Look at every rank; lower what is to be lowered; raise what may be raised."""
        # Asked again, a rank that always answers late would be away whenever slots are given out.
        look = {rank: talk.limit for rank, talk in enumerate(self._talks) if not talk.news}
        for talk in self._talks:
            talk.news = False
        await self._tell(look)
        views = self._views()
        if views is None:
            # One that has not answered yet may hold any number of sessions.
            return
        rooms, _ = self._divide(views)
        await self._tell(
            {
                rank: view.now.admitted + rooms[rank]
                for rank, view in enumerate(views)
                if rooms[rank] < view.headroom
            }
        )
        views = self._views() or views
        rooms, self._turn = self._divide(views)
        spare = sum(rooms) - sum(view.headroom for view in views if not view.away)
        raised = {}
        for rank, view in enumerate(views):
            more = min(spare, rooms[rank] - view.headroom)
            if more > 0 and not view.away:
                spare -= more
                raised[rank] = view.now.admitted + view.headroom + more
        await self._tell(raised)

    def _divide(self, views: list[RankView]) -> tuple[list[int], int]:
        if not self.open:
            return [0] * len(views), self._turn
        return divide(views, self._config, self._turn)

    def _views(self) -> list[RankView] | None:
        views = [
            RankView(talk.now, talk.limit, talk.away)
            for talk in self._talks
            if talk.now is not None
        ]
        return views if len(views) == len(self._talks) else None

    async def _tell(self, limits: Mapping[int, int]) -> None:
        """Say it to each of these that is not still thinking about what it was told before."""
        said = []
        for rank, limit in limits.items():
            talk = self._talks[rank]
            if talk.task is None or talk.task.done():
                talk.task = asyncio.create_task(self._say(rank, talk, limit))
                said.append(talk.task)
        late = (await asyncio.wait(said, timeout=_ANSWER_TIMEOUT))[1] if said else ()
        for talk in self._talks:
            talk.late = talk.late or talk.task in late
            if talk.task is not None and talk.task.done():
                talk.task.result()

    async def _say(self, rank: int, talk: _RankConnection, limit: int) -> None:
        talk.limit = max(talk.limit, limit)
        talk.late = False
        try:
            talk.now = await self._ranks.clients[rank].set_capacity(
                limit=limit,
                ttl=_TTL,
                owner=self._owner,
                held=self._held(rank),
                number=next(self._numbers),
                retry_for=_RETRY_FOR,
            )
        except AnyAgentError as error:
            if not error.retryable:
                raise
            log.warning("rank %d could not be told its capacity: %s", rank, error.message)
            talk.failed = True
            return
        talk.limit = max(limit, talk.now.limit)
        talk.failed = False
        if talk.late:
            talk.news = True
            self.changed.set()
