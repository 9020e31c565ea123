"""The registry of a run's live parts: each part writes its own entry, and the others read all.

::

    registry/rank-0.json    one proxy: its URL, its engine's, its state and load
    registry/router.json    the public URL
    registry/trainer.json   the trainer's metrics

An entry is replaced as a whole, every second, so a reader that sees no change for ``SILENT_AFTER``
seconds knows that its writer is gone. A part has another boot id after each start.

A network file system may report a minute-old state of a file that is not open, so each check opens
the entries.

With `server.journal` each part writes its entry into Redis, too (`redis_registry`), and the readers
use the copy whose last write they noticed last. So the parts find each other without a folder that
all of them see, and either place may fail.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from any_agent.runtime.atomic_files import owner_only
from any_agent.runtime.disk_space import is_disk_full
from any_agent.runtime.file_watcher import WatchedPath

HEARTBEAT = 1.0  # seconds between a part's writes of its own entry
SILENT_AFTER = 10.0  # seconds without a write after which a part is taken for gone


class PartLoad(BaseModel):
    """The load of a rank."""

    model_config = ConfigDict(frozen=True)

    open: int = 0
    """Open sessions."""
    waiting: int = 0
    """Slots for which openings of sessions wait."""
    calls: int = 0
    """Running model calls."""


class RegistryEntry(BaseModel):
    """The description of one part of a run, written by that part."""

    model_config = ConfigDict(frozen=True)

    name: str
    """`rank-<number>`, `router` or `trainer`; also the file's name."""
    boot_id: str
    """An id that is new at each start of the part."""
    url: str
    """The URL at which other parts reach it."""
    pid: int
    state: Literal["starting", "ready", "stopping"] = "ready"
    engine_url: str | None = None
    """The URL of the rank's engine."""
    engine_up: bool = True
    """False while the rank's engine is dead or does not answer."""
    engine_silence: float = 0.0
    """Seconds for which the rank's engine has not answered, though something listens there."""
    version: int = 0
    """The weight version that the rank serves."""
    load: PartLoad = PartLoad()
    epoch: int = 0
    """The number of the latest start of the trainer that the rank's journal has."""
    led: bool = False
    """A trainer has set the rank's limit lately, so it gives the rank each new version."""
    admits: bool = True
    """False while a trainer that is loaded has not yet let the ranks admit sessions."""
    retired: bool = False
    """The rank takes no sessions, but members of groups that it has."""
    unfinished: int = 0
    """Sessions that are open, await their reward or wait for a trainer, and open groups."""
    replayable: bool = True
    """False if no resume from a checkpoint that is kept needs a session of a retired rank."""
    store_full: bool = False
    """True if the disk of the rank's journal is full: it can be read, but not written."""
    disk_full: str | None = None
    """The write of this part that waits for space on a full disk."""


def rank_name(rank: int) -> str:
    return f"rank-{rank}"


def publish(folder: Path, entry: RegistryEntry) -> None:
    """Replace an entry; readers see the old or the new one.

    It is not fsynced: no part survives a crash of the machine. On a full disk an existing entry is
    overwritten, which takes no space: a reader of half of it keeps its last copy.
    """
    target = folder / f"{entry.name}.json"
    content = entry.model_dump_json().encode()
    # The temporary name is the process's own: an earlier process may still be writing.
    temporary = folder / f".{entry.name}.{os.getpid()}"
    try:
        with open(temporary, "wb", opener=owner_only) as file:
            file.write(content)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if not is_disk_full(error) or not target.exists():
            raise
        with open(target, "r+b") as file:
            file.write(content)
            file.truncate()


Stamp = tuple[int, int, bytes]
"""Modification time, inode and content of an entry's file, which differ after each write."""


def read_stamp(folder: Path, name: str) -> Stamp | None:
    """Return the current stamp of an entry; None if it cannot be read."""
    try:
        with open(folder / f"{name}.json", "rb") as file:
            stat = os.fstat(file.fileno())
            return stat.st_mtime_ns, stat.st_ino, file.read()
    except OSError:
        return None


def read_entry(folder: Path, name: str) -> RegistryEntry | None:
    """Return an entry as it is now; None if it cannot be read."""
    stamp = read_stamp(folder, name)
    return _parse(name, stamp[2]) if stamp is not None else None


class EntryStore(Protocol):
    """A place of entries beside the folder. No call waits for long."""

    def write(self, entry: RegistryEntry) -> None:
        """Replace an entry. It raises nothing: the part lives on by its entry in the folder."""

    def read(self) -> Mapping[str, Stamp]:
        """Return the last known stamp of each entry by name."""

    def forget(self) -> None:
        """Remove the entries of an earlier service."""

    def close(self) -> None: ...


@dataclass(slots=True)
class RegistrySnapshot:
    """A reader's last copy of an entry."""

    stamp: Stamp
    at: float
    """The time of reading, in monotonic seconds."""
    entry: RegistryEntry | None


class Registry:
    """A reader's view of all entries; it keeps the last good copy of an unreadable one."""

    def __init__(self, folder: Path, also: EntryStore | None = None) -> None:
        self._folder = folder
        self._also = also
        self._seen: dict[str, RegistrySnapshot] = {}
        """The copies of the folder's entries."""
        self._seen_also: dict[str, RegistrySnapshot] = {}

    def refresh(self) -> None:
        """Read the entries that changed."""
        _follow(self._seen, _stamps(self._folder))
        if self._also is not None:
            _follow(self._seen_also, self._also.read())

    def _newest(self, name: str) -> RegistrySnapshot | None:
        """Return the copy whose last write was noticed last."""
        found = [seen[name] for seen in (self._seen, self._seen_also) if name in seen]
        return max(found, key=lambda seen: seen.at, default=None)

    def get(self, name: str) -> RegistryEntry | None:
        """Return the last good copy of an entry; its writer may be dead."""
        seen = self._newest(name)
        return seen.entry if seen is not None else None

    def entries(self) -> list[RegistryEntry]:
        """Return the last good copies of all entries."""
        found = (self.get(name) for name in {**self._seen, **self._seen_also})
        return [entry for entry in found if entry is not None]

    def heard(self, name: str) -> float:
        """Return when a write of this part was last noticed, in monotonic seconds; 0.0: never."""
        seen = self._newest(name)
        return seen.at if seen is not None else 0.0

    def alive(self, name: str) -> bool:
        """Return whether the part is ready and has written lately."""
        seen = self._newest(name)
        return (
            seen is not None
            and seen.entry is not None
            and seen.entry.state == "ready"
            and time.monotonic() - seen.at < SILENT_AFTER
        )

    def close(self) -> None:
        if self._also is not None:
            self._also.close()


def _stamps(folder: Path) -> dict[str, Stamp]:
    try:
        with os.scandir(folder) as files:
            names = [f.name.removesuffix(".json") for f in files if f.name[:1] != "."]
    except OSError:
        return {}
    stamps = {name: read_stamp(folder, name) for name in names}
    return {name: stamp for name, stamp in stamps.items() if stamp is not None}


def _follow(seen: dict[str, RegistrySnapshot], stamps: Mapping[str, Stamp]) -> None:
    """Copy the entries whose stamps changed."""
    for name, stamp in stamps.items():
        before = seen.get(name)
        if before is None or before.stamp != stamp:
            entry = _parse(name, stamp[2]) or (before.entry if before else None)
            seen[name] = RegistrySnapshot(stamp, time.monotonic(), entry)


def _parse(name: str, content: bytes) -> RegistryEntry | None:
    try:
        entry = RegistryEntry.model_validate_json(content)
    except ValidationError:
        return None
    return entry if entry.name == name else None


log = logging.getLogger(__name__)


def run_is_gone(run: Path) -> str:
    """Return why a part ends once its run's folder is no longer where it was."""
    return (
        f"the run's folder {run} was removed, renamed or replaced while the service used it: "
        "nothing is acknowledged any more; put it back in its place, or choose another --trial"
    )


class Heartbeat:
    """Writes the part's entry at the start, at each heartbeat, and once more when the part stops.

    The event loop makes each beat and a thread writes it, so no call waits for the disk, and a loop
    that hangs falls silent, as it should. A failed write is logged once and repeated, because a
    silent part is taken for dead.

    Where the registry is removed, renamed or replaced, so is its run: it calls ``on_lost`` with the
    reason at the next beat, and writes no more.
    """

    def __init__(
        self,
        folder: Path,
        describe: Callable[[], RegistryEntry],
        also: EntryStore | None = None,
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._watched: WatchedPath | None = None
        self._on_lost = on_lost
        self._lost = False
        self._describe = describe
        self._also = also
        self._ended = False
        self._stopping = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failed = False

    async def begin(self) -> None:
        with suppress(OSError):
            self._watched = await asyncio.to_thread(WatchedPath, self._folder)
        await self._write()
        self._task = asyncio.create_task(self._beat())

    def stopping(self) -> None:
        """Publish the state `stopping` at once and from now on."""
        self._stopping = True
        self._wake.set()

    async def end(self) -> None:
        self._ended = True
        self.stopping()
        if self._task is not None:
            # Not cancelled, because a running write would come after the last one.
            await self._task
        await self._write()
        if self._also is not None:
            await asyncio.to_thread(self._also.close)
        if self._watched is not None:
            self._watched.close()

    async def _beat(self) -> None:
        while not self._ended:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), HEARTBEAT)
            self._wake.clear()
            await self._write()

    async def _write(self) -> None:
        if not self._lost and self._watched is not None:
            self._lost = await asyncio.to_thread(self._watched.is_gone)
            if self._lost:
                self._on_lost(run_is_gone(self._folder.parent))
        if self._lost:
            return
        try:
            entry = self._describe()
            if self._stopping:
                entry = entry.model_copy(update={"state": "stopping"})
            if self._also is not None:
                await asyncio.to_thread(self._also.write, entry)
            # Where it was seen: another folder may have its name since then.
            folder = self._folder if self._watched is None else self._watched.held
            await asyncio.to_thread(publish, folder, entry)
        except Exception as error:
            if not self._failed:
                fault = not isinstance(error, OSError)
                log.warning("cannot write the registry entry; retrying: %s", error, exc_info=fault)
            self._failed = True
        else:
            if self._failed:
                log.info("the registry entry can be written again")
            self._failed = False
