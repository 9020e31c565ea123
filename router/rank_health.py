"""Which ranks serve now, by the registry and by our own connections; waiting for one."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from any_agent.errors import ServiceUnavailable
from any_agent.rundir.registry import Registry, RegistryEntry, rank_name

log = logging.getLogger(__name__)

_REFRESH = 0.5
_MAX_WAITING = 1024
"""Requests that may wait for ranks at once; further ones are sent away."""


class RankHealth:
    """The ranks of one service. A rank that refused a connection counts as away until it writes
    its registry entry again."""

    def __init__(self, registry: Registry, count: int, *, wait: float) -> None:
        self._registry = registry
        self.count = count
        self.wait = wait
        self.waiting = 0
        """Requests that wait for a rank now."""
        self._failed_at = [0.0] * count
        """What was heard of a rank before that is no news; infinite until the registry was read."""
        self._urls: list[str] = [""] * count
        """Of the ranks that serve; "" for the others."""
        self._changed = asyncio.Event()
        self._given_up = False
        self._look = asyncio.Event()
        """Set to have the registry read now."""
        self.live: list[int] = []
        """The ranks that serve now, in order."""

    async def refresh(self) -> None:
        """Read the registry anew, and wake who waits for a rank that it shows.

        In a thread: no stream waits for the disk. While that takes nothing, the view stands still.
        """
        failed = [rank for rank, at in enumerate(self._failed_at) if at == math.inf]
        await asyncio.to_thread(self._registry.refresh)
        for rank in failed:
            self._failed_at[rank] = time.monotonic()
        self._update()

    def _update(self) -> None:
        urls = [self._url(rank) for rank in range(self.count)]
        if urls == self._urls:
            return
        for rank, (before, now) in enumerate(zip(self._urls, urls, strict=True)):
            if before != now:
                log.info("rank %d serves at %s" if now else "rank %d is away%s", rank, now)
        self._urls = urls
        self.live = [rank for rank, url in enumerate(urls) if url]
        self._changed.set()
        self._changed = asyncio.Event()

    def _url(self, rank: int) -> str:
        name = rank_name(rank)
        entry = self._registry.get(name)
        alive = self._registry.alive(name) and self._registry.heard(name) > self._failed_at[rank]
        return entry.url.rstrip("/") if entry is not None and alive else ""

    def entry(self, rank: int) -> RegistryEntry | None:
        """What the rank last said of itself."""
        return self._registry.get(rank_name(rank))

    @property
    def trainer(self) -> RegistryEntry | None:
        """What the trainer last said of itself."""
        return self._registry.get("trainer")

    def failed(self, rank: int) -> None:
        """A connection could not be made: the rank is away until it says otherwise.

        At once, and without the disk, which may hang. What the rank wrote before now, but was not
        read yet, is no news; so the next look at the registry only tells what there is already.
        """
        self._failed_at[rank] = math.inf
        self._update()
        self._look.set()

    def url(self, rank: int) -> str:
        """Where the rank serves; "" while it is away."""
        return self._urls[rank]

    async def reach(self, rank: int, deadline: float) -> str:
        """Its URL, waiting for it until the deadline; then ServiceUnavailable."""
        while not self._urls[rank]:
            what = f"rank {rank}, where this session lives, does not answer or is restarting"
            await self._wait(deadline, what)
        return self._urls[rank]

    async def reach_any(self, deadline: float) -> list[int]:
        """The ranks that serve, waiting for one until the deadline; then ServiceUnavailable."""
        while not self.live:
            await self._wait(deadline, "no rank of the service is up")
        return self.live

    def give_up(self) -> None:
        """Who waits for a rank waits no longer, and nobody will."""
        self._given_up = True
        self._changed.set()

    async def _wait(self, deadline: float, what: str) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or self._given_up or self.waiting >= _MAX_WAITING:
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
        """Keep the view fresh."""
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
                async with asyncio.timeout(_REFRESH):
                    await self._look.wait()
            self._look.clear()
            try:
                await self.refresh()
            except Exception:
                # Without it no rank would ever come back.
                log.exception("the registry could not be read and will be tried again")
