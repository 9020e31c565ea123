"""Tells the other parts of the run, by the registry, that this one lives: of a process with a loop.

The event loop makes each beat, and a thread writes it. So no call waits for the disk, and a loop
that hangs falls silent, as it should.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from any_agent.rundir.registry import HEARTBEAT, RegistryEntry, publish

log = logging.getLogger(__name__)


class Heartbeat:
    """Writes the part's entry now, at each heartbeat, and once more when the part stops.

    Whatever fails meanwhile is told once and tried again: who falls silent is taken for dead.
    """

    def __init__(self, folder: Path, describe: Callable[[], RegistryEntry]) -> None:
        self._folder = folder
        self._describe = describe
        self._over = False
        self._stopping = False
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failed = False

    async def begin(self) -> None:
        await self._write()
        self._task = asyncio.create_task(self._beat())

    def stopping(self) -> None:
        """It ends what is under way: from now on, and at once, it says so."""
        self._stopping = True
        self._hurry.set()

    async def end(self) -> None:
        self._over = True
        self.stopping()
        if self._task is not None:
            # Not cancelled: a write under way would come after the last one.
            await self._task
        await self._write()

    async def _beat(self) -> None:
        while not self._over:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), HEARTBEAT)
            self._hurry.clear()
            await self._write()

    async def _write(self) -> None:
        try:
            entry = self._describe()
            if self._stopping:
                entry = entry.model_copy(update={"state": "stopping"})
            await asyncio.to_thread(publish, self._folder, entry)
        except Exception as error:
            if not self._failed:
                fault = not isinstance(error, OSError)
                log.warning(
                    "cannot tell that this part is alive, trying again: %s", error, exc_info=fault
                )
            self._failed = True
        else:
            if self._failed:
                log.info("it can be told again that this part is alive")
            self._failed = False
