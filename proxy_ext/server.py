"""The HTTP server of a rank: it registers the rank with the run, and drains before it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from any_agent.rundir.registry import EntryStore, Heartbeat, PartLoad, RegistryEntry, rank_name
from any_agent.types import SessionMode, SessionState
from proxy_ext.service import RankService
from proxy_ext.web.drain import InterruptibleApp

log = logging.getLogger(__name__)

_FINAL_WAIT = 0.5  # seconds for requests that are about to be answered


def entry_of(service: RankService, *, url: str, boot_id: str) -> RegistryEntry:
    """Return the rank's registry entry as of now."""
    counts = service.sessions.counts.now
    return RegistryEntry(
        name=rank_name(service.rank),
        boot_id=boot_id,
        url=url,
        pid=os.getpid(),
        engine_url=service.engine.url,
        engine_up=not service.engine.away,
        engine_silence=service.engine.silence,
        version=service.run.version,
        load=PartLoad(
            open=sum(counts[mode, SessionState.OPEN] for mode in SessionMode),
            waiting=service.sessions.admission.waiting,
            calls=len(service.calls),
        ),
        epoch=service.fence.epoch,
        led=service.sessions.admission.limited,
        retired=service.opening.retired,
        unfinished=service.unfinished,
        replayable=service.replayable,
        store_full=service.journal.stats.full,
    )


class DrainingServer(uvicorn.Server):
    """A server that is registered while it takes new work, and drains at SIGTERM.

    To drain it announces that it stops, awaits ``drain``, then every request under way for up to
    ``drain_timeout`` seconds, and ends. SIGINT, or a second signal, ends it at once. Either way it
    exits successfully.

    ``lost`` returns a reason once the rank is another process's, or its files are gone: then it
    ends at once. ``on_lost`` is called with the reason once the run's folder is gone.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        folder: Path,
        describe: Callable[[], RegistryEntry],
        drain: Callable[[], Awaitable[None]],
        *,
        drain_timeout: float,
        lost: Callable[[], str | None],
        on_lost: Callable[[str], None],
        also: EntryStore | None = None,
    ) -> None:
        """``folder`` is the registry; ``also`` gets the entry, too."""
        self._app = config.app = InterruptibleApp(cast(ASGIApp, config.app))
        super().__init__(config)
        self._heartbeat: Heartbeat | None = None
        self._folder = folder
        self._also = also
        self._describe = describe
        self._drain = drain
        self._drain_timeout = drain_timeout
        self._lost = lost
        self._on_lost = on_lost
        self.lost: str | None = None
        """The reason of an end because the rank, or its files, are no longer this process's."""
        self._drain_requested = False
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. uvicorn's own raises it again at the end, which would kill us."""
        if sig == signal.SIGTERM and self.started and not self._drain_requested:
            self._drain_requested = True
        else:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Start a requested drain, or end; uvicorn calls this ten times a second."""
        self.lost = self._lost()
        if self.lost is not None:
            self.should_exit = True
        if self._drain_requested and self._draining is None:
            self._draining = asyncio.create_task(self._run_drain())
        return await super().on_tick(counter)

    async def _run_drain(self) -> None:
        try:
            if self._heartbeat is not None:
                self._heartbeat.stopping()
            await self._drain()
            await self.wait_until_idle(self._drain_timeout)
        except Exception:
            log.exception("the drain failed; requests under way are cut off")
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._heartbeat = Heartbeat(self._folder, self._describe, self._also, self._on_lost)
            await self._heartbeat.begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._draining is not None:
            self._draining.cancel()
        if self._heartbeat is not None:
            await self._heartbeat.end()
        await self.wait_until_idle(_FINAL_WAIT)
        self._app.cut_off = True
        # Those that come from here on are refused by the app itself; the task of one that has just
        # come must have begun, because the app of a task that is cancelled before never answers.
        tasks = tuple(self.server_state.tasks)
        await asyncio.sleep(0)
        if cut := sum(task.cancel() for task in tasks):
            log.warning("%d requests were not answered in time and are cut off", cut)
        await super().shutdown(sockets=sockets)

    async def wait_until_idle(self, seconds: float) -> None:
        """Wait up to ``seconds`` until no request is under way; new ones are answered, too."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while tasks := self.server_state.tasks:
                    await asyncio.wait(tasks)
