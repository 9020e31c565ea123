"""Tells the other parts of the run that this rank serves, and what it is busy with."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from any_agent.registry import HEARTBEAT, Entry, Load, publish, rank_name
from any_agent.types import SessionMode, SessionState
from proxy_ext.service import Service

log = logging.getLogger(__name__)


def entry_of(service: Service, *, url: str, boot_id: str) -> Entry:
    """The rank as it is now."""
    counts = service.sessions.counts.now
    return Entry(
        name=rank_name(service.rank),
        boot_id=boot_id,
        url=url,
        pid=os.getpid(),
        engine_url=service.engine.url,
        version=service.run.version,
        load=Load(
            open=sum(counts[mode, SessionState.OPEN] for mode in SessionMode),
            waiting=service.sessions.admission.waiting,
            calls=len(service.calls),
        ),
    )


class Presence:
    """Writes the rank's entry now, at each heartbeat, and once more when the rank stops."""

    def __init__(self, folder: Path, describe: Callable[[], Entry]) -> None:
        self._folder = folder
        self._describe = describe
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failed = False

    async def begin(self) -> None:
        await self._write(self._describe())
        self._task = asyncio.create_task(self._beat())

    async def end(self) -> None:
        self._over.set()
        if self._task is not None:
            # Not cancelled: a write under way would come after the last one.
            await self._task
        await self._write(self._describe().model_copy(update={"state": "stopping"}))

    async def _beat(self) -> None:
        while not self._over.is_set():
            try:
                await asyncio.wait_for(self._over.wait(), HEARTBEAT)
            except TimeoutError:
                await self._write(self._describe())

    async def _write(self, entry: Entry) -> None:
        """In a thread: no call waits for the disk. A failure is told once and tried again."""
        try:
            await asyncio.to_thread(publish, self._folder, entry)
        except OSError as error:
            if not self._failed:
                log.warning("cannot tell that this rank is alive, trying again: %s", error)
            self._failed = True
        else:
            if self._failed:
                log.info("it can be told again that this rank is alive")
            self._failed = False


class PresentServer(uvicorn.Server):
    """Present from when it listens until it is told to stop, before it lets its calls end."""

    def __init__(self, config: uvicorn.Config, folder: Path, describe: Callable[[], Entry]) -> None:
        super().__init__(config)
        self._present: Presence | None = None
        self._folder = folder
        self._describe = describe

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._present = Presence(self._folder, self._describe)
            await self._present.begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._present is not None:
            await self._present.end()
        await super().shutdown(sockets=sockets)
