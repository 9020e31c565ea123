"""Tells the other parts of the run that this rank serves, and what it is busy with."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from any_agent.rundir.heartbeat import Heartbeat
from any_agent.rundir.registry import PartLoad, RegistryEntry, rank_name
from any_agent.types import SessionMode, SessionState
from proxy_ext.service import RankService
from proxy_ext.web.drain import InFlightCounter

log = logging.getLogger(__name__)

_LAST_MOMENT = 0.5
"""Seconds."""


def entry_of(service: RankService, *, url: str, boot_id: str) -> RegistryEntry:
    """The rank as it is now."""
    counts = service.sessions.counts.now
    return RegistryEntry(
        name=rank_name(service.rank),
        boot_id=boot_id,
        url=url,
        pid=os.getpid(),
        engine_url=service.engine.url,
        version=service.run.version,
        load=PartLoad(
            open=sum(counts[mode, SessionState.OPEN] for mode in SessionMode),
            waiting=service.sessions.admission.waiting,
            calls=len(service.calls),
        ),
        store_full=service.journal.stats.full,
    )


class DrainingServer(uvicorn.Server):
    """Present from when it listens until it is told to stop, before it lets its calls end.

    SIGTERM drains: it says that it stops, awaits ``drain``, then every request under way for up to
    ``drain_timeout`` seconds, and ends. SIGINT, or a second signal, ends it at once. Either way it
    has ended well.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        folder: Path,
        describe: Callable[[], RegistryEntry],
        drain: Callable[[], Awaitable[None]],
        *,
        drain_timeout: float,
    ) -> None:
        self._under_way = InFlightCounter(cast(ASGIApp, config.app))
        config.app = self._under_way
        super().__init__(config)
        self._present: Heartbeat | None = None
        self._folder = folder
        self._describe = describe
        self._drain = drain
        self._drain_timeout = drain_timeout
        self._asked = False
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own raises the signal again at the end, and the process would die of it."""
        if sig == signal.SIGTERM and self.started and not self._asked:
            self._asked = True
        else:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._asked and self._draining is None:
            self._draining = asyncio.create_task(self._drained())
        return await super().on_tick(counter)

    async def _drained(self) -> None:
        try:
            if self._present is not None:
                self._present.stopping()
            await self._drain()
            await self._under_way.none(self._drain_timeout)
        except Exception:
            log.exception("what is under way could not be awaited")
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._present = Heartbeat(self._folder, self._describe)
            await self._present.begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._draining is not None:
            self._draining.cancel()
        if self._present is not None:
            await self._present.end()
        # Whatever is about to be answered.
        await self._under_way.none(_LAST_MOMENT)
        if cut := self._under_way.cut():
            log.warning("%d requests were not answered in time and are cut off", cut)
        await super().shutdown(sockets=sockets)
