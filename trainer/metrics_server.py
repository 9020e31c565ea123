"""The trainer's registry entry and its `/metrics`, on a thread beside the one that trains."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from aiohttp import web

from any_agent import keys
from any_agent.errors import AnyAgentError, Unauthenticated
from any_agent.keys import KeySigner
from any_agent.rundir.registry import EntryStore, Heartbeat, RegistryEntry
from any_agent.runtime.bounded_server import BoundedRunner
from any_agent.runtime.event_loop import LoopThread
from any_agent.runtime.metrics import CONTENT_TYPE
from any_agent.runtime.ports import port_of, reserve, url_of
from trainer.metrics import TrainerMetrics

log = logging.getLogger(__name__)

LAST_WRITE_TIMEOUT = 60.0
"""Seconds that a trainer which is done waits until its last registry entry is written."""


class TrainerHeartbeat:
    """A context manager: while it is open, `/metrics` is served and the registry entry is fresh.

    ``signer`` checks the key that metrics need. ``ready`` returns False while the
    trainer still starts. ``host`` is an address that the router reaches. ``pid`` is the process
    that the launcher started, if that is not this one. ``on_lost`` is called with the reason, in
    another thread, once the run's folder is gone.
    """

    def __init__(
        self,
        folder: Path,
        metrics: TrainerMetrics,
        *,
        signer: KeySigner,
        ready: Callable[[], bool],
        admits: Callable[[], bool] = lambda: True,
        host: str = "127.0.0.1",
        pid: int | None = None,
        also: EntryStore | None = None,
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._metrics = metrics
        self._signer = signer
        self._listener = reserve(host, 0)
        self.url = url_of(host, port_of(self._listener))
        self._ready = ready
        self._admits = admits
        self._pid = pid or os.getpid()
        self._boot_id = secrets.token_hex(8)
        self._heartbeat = Heartbeat(folder, self._entry, also, on_lost)
        self._loop = LoopThread("heartbeat")

    def __enter__(self) -> Self:
        self._loop.start()
        self._runner = self._loop.call(self._serve())
        # Not waited for: a disk that hangs must not keep the trainer from its work.
        self._begun = asyncio.run_coroutine_threadsafe(self._heartbeat.begin(), self._loop.loop)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with suppress(TimeoutError):
            self._loop.call(self._runner.cleanup(), 5)
        # The run waits for a trainer that failed, but not for one that is done.
        if kind is None:
            try:
                self._loop.call(self._end(), LAST_WRITE_TIMEOUT)
            except TimeoutError:
                log.warning(
                    "the trainer's last registry entry is not written after %g s",
                    LAST_WRITE_TIMEOUT,
                )
        self._loop.stop()

    async def _end(self) -> None:
        await asyncio.wrap_future(self._begun)
        await self._heartbeat.end()

    def _entry(self) -> RegistryEntry:
        return RegistryEntry(
            name="trainer",
            boot_id=self._boot_id,
            url=self.url,
            pid=self._pid,
            state="ready" if self._ready() else "starting",
            version=self._metrics.version,
            admits=self._admits(),
            disk_full=str(wait) if (wait := self._metrics.disk.waiting) else None,
        )

    async def _serve(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/metrics", self._scrape)
        runner = BoundedRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.SockSite(runner, self._listener).start()
        return runner

    async def _scrape(self, request: web.Request) -> web.Response:
        """Answer who has the router's key; others read the router's metrics."""
        given = [request.headers.getall(name, []) for name in ("Authorization", "X-Api-Key")]
        try:
            if not self._signer.is_metrics_key(keys.bearer_of(*given)):
                raise Unauthenticated("the trainer's metrics are part of the router's /metrics")
        except AnyAgentError as error:
            return web.Response(status=error.status, text=f"{error.message}\n")
        body = self._metrics.exposition().render()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})
