"""The ranks that serve now, by the registry and the router's connections; waits for one."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from any_agent.errors import ServiceUnavailable
from any_agent.rundir.fleet import Fleet, FleetFile
from any_agent.rundir.registry import Registry, RegistryEntry, rank_name

log = logging.getLogger(__name__)

REFRESH = 0.5
STALLED_AFTER = 3.5
"""Seconds without a registry entry after which a rank that takes connections opens no session."""
_STALL_GRACE = 2.0
"""Seconds that a rank which is stalled already has for the answer to an open."""
MAX_WAITING = 1024  # requests that may wait for ranks at once; further ones get 503


class RankHealth:
    """The ranks of one service and their URLs.

    A rank that refused a connection counts as away until it writes its registry entry again.
    """

    def __init__(self, registry: Registry, fleet: FleetFile, *, wait: float) -> None:
        self._registry = registry
        self._fleet = fleet
        self.wait = wait
        self.waiting = 0
        """Number of requests that wait for a rank now."""
        self._failed_at: dict[int, float] = {}
        """Time of each rank's last failure, before which its entries do not count; infinite until
        the registry was read."""
        self._urls: dict[int, str] = {}
        """The URLs of the ranks that answer; "" for the others."""
        self._changed = asyncio.Event()
        self._stopped = False
        self._refresh_now = asyncio.Event()
        """Set in order to read the registry at once."""
        self.live: list[int] = []
        """The ranks that answer now, in order."""
        self.fit: list[int] = []
        """The best of them for new sessions: if possible those that serve, with a heartbeat and an
        engine."""
        self._stalled: frozenset[int] = frozenset()
        self._read_at = 0.0
        """The time of the last look into the registry."""
        self._asked: dict[asyncio.Future[None], tuple[int, float]] = {}
        """The futures of :meth:`stall` that are not done, each with its rank and its time."""

    async def refresh(self) -> None:
        """Read the registry again, and wake requests that wait for a rank that it shows.

        A thread reads it, so that no stream waits for the disk.
        """
        failed = [rank for rank, at in self._failed_at.items() if at == math.inf]
        now = time.monotonic()
        await asyncio.to_thread(self._read)
        self._read_at = now
        for rank in failed:
            self._failed_at[rank] = time.monotonic()
        self._update()

    def _read(self) -> None:
        self._fleet.refresh()
        self._registry.refresh()

    @property
    def fleet(self) -> Fleet:
        return self._fleet.now

    def _update(self) -> None:
        urls = {rank: self._url(rank) for rank in self.fleet.ranks}
        self.live = [rank for rank, url in urls.items() if url]
        heard = {rank: self._registry.heard(rank_name(rank)) for rank in self.live}
        # Compared with the last look: while the registry's disk hangs nobody is heard.
        self._stalled = frozenset(
            rank for rank, at in heard.items() if self._read_at - at > STALLED_AFTER
        )
        awake = [rank for rank in self.live if rank not in self._stalled]
        serving = [rank for rank in awake if self.fleet.state(rank) == "serving"] or awake
        self.fit = [rank for rank in serving if self.engine_up(rank)] or serving or self.live
        self._report_stalls()
        if urls == self._urls:
            return
        for rank in sorted({*self._urls, *urls}):
            if (now := urls.get(rank, "")) != self._urls.get(rank, ""):
                log.info("rank %d serves at %s" if now else "rank %d does not answer%s", rank, now)
        self._urls = urls
        self._changed.set()
        self._changed = asyncio.Event()

    def _url(self, rank: int) -> str:
        name = rank_name(rank)
        entry = self._registry.get(name)
        failed_at = self._failed_at.get(rank, 0.0)
        alive = self._registry.alive(name) and self._registry.heard(name) > failed_at
        return entry.url.rstrip("/") if entry is not None and alive else ""

    def entry(self, rank: int) -> RegistryEntry | None:
        return self._registry.get(rank_name(rank))

    @property
    def trainer_alive(self) -> bool:
        """True if the trainer is ready and has written its entry lately."""
        return self._registry.alive("trainer")

    def engine_up(self, rank: int) -> bool:
        """Return False if the rank's engine is dead or hangs."""
        entry = self.entry(rank)
        return entry is None or entry.engine_up

    def stalled(self, rank: int) -> bool:
        """Return whether a rank that takes connections has sent no heartbeat for a while."""
        return rank in self._stalled

    @contextmanager
    def stall(self, rank: int) -> Iterator[asyncio.Future[None]]:
        """Yield a future that is done if the rank stalls inside the block."""
        future = asyncio.get_running_loop().create_future()
        self._asked[future] = rank, time.monotonic()
        try:
            yield future
        finally:
            del self._asked[future]

    def _report_stalls(self) -> None:
        latest = time.monotonic() - _STALL_GRACE
        for future, (rank, since) in self._asked.items():
            if rank in self._stalled and since < latest and not future.done():
                future.set_result(None)

    @property
    def trainer(self) -> RegistryEntry | None:
        return self._registry.get("trainer")

    def mark_failed(self, rank: int) -> None:
        """Count a rank that refused a connection as away until it writes its entry again.

        This takes effect at once, without the disk, which may hang. An entry that the rank wrote
        before now does not count, even if it is read later.
        """
        self._failed_at[rank] = math.inf
        self._update()
        self._refresh_now.set()

    def url(self, rank: int) -> str:
        """Return the rank's URL; "" while it is away."""
        return self._urls.get(rank, "")

    async def reach(self, rank: int, deadline: float) -> str:
        """Return the rank's URL once it answers; ServiceUnavailable at the deadline."""
        while not (url := self.url(rank)):
            if self.fleet.state(rank) is None:
                raise ServiceUnavailable(f"rank {rank} was drained; try again", retry_after=1)
            what = f"rank {rank}, where this session lives, does not answer or is restarting"
            await self._wait(deadline, what)
        return url

    async def reach_any(self, deadline: float) -> list[int]:
        """Return the ranks that answer once there is one; ServiceUnavailable at the deadline."""
        while not self.live:
            await self._wait(deadline, "no rank of the service is up")
        return self.live

    def stop_waiting(self) -> None:
        """Refuse all requests that wait for a rank, and those that would."""
        self._stopped = True
        self._changed.set()

    async def _wait(self, deadline: float, what: str) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or self._stopped or self.waiting >= MAX_WAITING:
            raise ServiceUnavailable(f"{what}; try again", retry_after=2)
        self.waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._changed.wait()
        finally:
            self.waiting -= 1

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Follow the registry until the context ends."""
        await self.refresh()
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH):
                    await self._refresh_now.wait()
            self._refresh_now.clear()
            try:
                await self.refresh()
            except Exception:
                # If this task ended, no rank would ever come back.
                log.exception("the registry could not be read and will be tried again")
