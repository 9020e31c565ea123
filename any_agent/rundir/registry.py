"""Who serves where: each part of a run writes its own entry, the others read them all.

::

    registry/rank-0.json    one proxy: its URL, its engine's, its state and load
    registry/router.json    the public URL
    registry/trainer.json   the trainer's metrics

An entry is replaced whole, several times a minute at least, so a reader that sees no change for
``SILENT_AFTER`` seconds knows that its writer is gone. Only the writer's boot id tells one life
of a part from its next.

Where the folder is on a network file system, what one machine is told of a file may be old by a
minute, unless the file is opened: so entries are opened, and what is open is looked at.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

HEARTBEAT = 1.0
"""Seconds between a part's writes of its own entry."""
SILENT_AFTER = 10.0
"""Seconds without a write after which a part is taken for gone."""


class PartLoad(BaseModel):
    """What a rank is busy with."""

    model_config = ConfigDict(frozen=True)

    open: int = 0
    """Open sessions."""
    waiting: int = 0
    """Slots that opens wait for."""
    calls: int = 0
    """Model calls under way."""


class RegistryEntry(BaseModel):
    """One part of a run, as it describes itself."""

    model_config = ConfigDict(frozen=True)

    name: str
    """`rank-<number>`, `router` or `trainer`; also the file's."""
    boot_id: str
    """Another one each time the part starts."""
    url: str
    """Where it is reached by the other parts."""
    pid: int
    state: Literal["starting", "ready", "stopping"] = "ready"
    engine_url: str | None = None
    """The rank's engine."""
    version: int = 0
    """The weight version that the rank serves."""
    load: PartLoad = PartLoad()
    store_full: bool = False
    """The rank's journal has no room: it can be read, and takes nothing."""


def rank_name(rank: int) -> str:
    return f"rank-{rank}"


def publish(folder: Path, entry: RegistryEntry) -> None:
    """Replace an entry; readers see the old or the new one, never half of it.

    Not fsynced: after a crash of the machine nobody in it is alive.
    """
    target = folder / f"{entry.name}.json"
    # The process's own temporary name: an earlier life may still be writing.
    temporary = folder / f".{entry.name}.{os.getpid()}"
    temporary.write_text(entry.model_dump_json(), encoding="utf-8")
    temporary.replace(target)


Stamp = tuple[int, int, bytes]
"""Modification time, inode and content of an entry's file: another one after each write."""


def read_stamp(folder: Path, name: str) -> Stamp | None:
    """Of an entry as it is now; None if it cannot be read."""
    try:
        with open(folder / f"{name}.json", "rb") as file:
            stat = os.fstat(file.fileno())
            return stat.st_mtime_ns, stat.st_ino, file.read()
    except OSError:
        return None


@dataclass(slots=True)
class RegistrySnapshot:
    """A reader's knowledge of a part."""

    stamp: Stamp
    at: float
    """Monotonic."""
    entry: RegistryEntry | None


class Registry:
    """A reader's view. The last good copy of an entry is kept when a file cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, RegistrySnapshot] = {}

    def refresh(self) -> None:
        """Read what changed: some small files, and nothing of the network but these."""
        try:
            with os.scandir(self._folder) as files:
                names = [f.name.removesuffix(".json") for f in files if f.name[:1] != "."]
        except OSError:
            return
        for name in names:
            stamp = read_stamp(self._folder, name)
            before = self._seen.get(name)
            if stamp is None or (before is not None and before.stamp == stamp):
                continue
            entry = _parse(name, stamp[2]) or (before.entry if before else None)
            self._seen[name] = RegistrySnapshot(stamp, time.monotonic(), entry)

    def get(self, name: str) -> RegistryEntry | None:
        """The last good copy, whether or not its writer still lives."""
        seen = self._seen.get(name)
        return seen.entry if seen is not None else None

    def entries(self) -> list[RegistryEntry]:
        """All of them, as :meth:`get` gives each."""
        return [seen.entry for seen in self._seen.values() if seen.entry is not None]

    def heard(self, name: str) -> float:
        """When a write of this part was last noticed, in monotonic seconds; 0.0 for never."""
        seen = self._seen.get(name)
        return seen.at if seen is not None else 0.0

    def alive(self, name: str) -> bool:
        """Whether the part is ready and has written lately."""
        seen = self._seen.get(name)
        return (
            seen is not None
            and seen.entry is not None
            and seen.entry.state == "ready"
            and time.monotonic() - seen.at < SILENT_AFTER
        )


def _parse(name: str, content: bytes) -> RegistryEntry | None:
    try:
        entry = RegistryEntry.model_validate_json(content)
    except ValidationError:
        return None
    return entry if entry.name == name else None


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
