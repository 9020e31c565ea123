"""Moves sessions that no resume needs from the journal into archives, a bounded batch at a time,
and removes the oldest archives beyond a limit.

A batch is in a file, complete and on disk, before one transaction of the journal drops its
sessions. The journal has the file's name before the file gets it, and that transaction removes the
name. So a name in the journal means that the file's sessions are still in the journal, and the file
is removed. Nothing is lost or kept twice, wherever a process is killed.

Of an archive beyond the limit the journal first learns that its sessions' content is gone. So a
file that is still there after a kill is the oldest one again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from any_agent.errors import AnyAgentError
from proxy_ext.archive.files import (
    ArchiveFile,
    ArchiveWriter,
    list_archives,
    remove_file,
    remove_from,
    remove_partial,
    sessions_in,
)
from proxy_ext.archive.records import record_line
from proxy_ext.journal import ArchiveContent, EraseContent, Journal, NumberedRow, PutMeta
from proxy_ext.sessions.session_store import SessionStore

log = logging.getLogger(__name__)

_MIN_INTERVAL, _MAX_INTERVAL = 1.0, 900.0
"""Bounds of the seconds between two sweeps, which are a fiftieth of the time that content is kept.
Each sweep may write a file."""
_RETRY_DELAY = 30.0  # seconds at most to the first sweep, and to the next one after a failure
BATCH = 256
BATCH_BYTES = 16 * 2**20
"""Uncompressed bytes of a batch: its removal delays the next writes by some milliseconds."""
_PAUSE = 0.05
_MAX_TRIMS = 256  # trims of the journal in a row
_FREE = 4 * 2**20  # bytes of free space that the journal keeps for its next writes
_INTENT = "archiving"
_TOTALS = "archived"


class Archiver:
    """The archives of one rank."""

    def __init__(
        self,
        sessions: SessionStore,
        folder: Path,
        *,
        about: dict[str, Any],
        keep_seconds: float,
        oldest_step: Callable[[], int | None],
        limit: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """``about`` is written at the top of each file; ``limit`` returns the most bytes of all."""
        self._sessions = sessions
        self._journal = sessions.journal
        self._folder = folder
        self._about = about
        self.keep_seconds = keep_seconds
        self._oldest_step = oldest_step
        self.limit = limit
        self._unreadable: set[str] = set()
        self._files = asyncio.Lock()
        """A lock for the removal of a session from a file."""
        self.sessions = 0
        """Number of sessions archived in this trial."""
        self.bytes = 0
        """Size of the files."""
        self.removed = 0
        """Number of sessions whose archives were removed for the limit, since this start."""

    async def recover(self) -> None:
        """Learn what there is, and remove the unfinished files of a killed process."""
        totals = await self._journal.meta(_TOTALS) or {}
        self.sessions = totals.get("sessions", 0)
        remove_partial(self._folder, self._sessions.rank)
        await self._undo_interrupted()
        files = await asyncio.to_thread(list_archives, self._folder, self._sessions.rank)
        self.bytes = await asyncio.to_thread(lambda: sum(map(_size, files)))

    async def run(self) -> None:
        """Archive sessions, and return free space to the disk, until cancelled."""
        usual = min(max(_MIN_INTERVAL, self.keep_seconds / 50), _MAX_INTERVAL)
        soon = min(usual, _RETRY_DELAY)
        wait = soon
        while True:
            await asyncio.sleep(wait)
            wait = soon
            try:
                await self.sweep_all()
                wait = usual
            except AnyAgentError as error:
                log.warning("archiving failed and will be tried again: %s", error.message)
            except OSError as error:
                log.warning(
                    "an archive cannot be written, so its sessions stay in the journal: %s", error
                )
            except Exception:
                log.exception("archiving failed and will be tried again")

    async def sweep_all(self) -> None:
        """Archive all that is to be archived, keep to the limit, and shrink the journal."""
        while True:
            began = time.monotonic()
            if not await self.sweep():
                break
            # Half of the time is left to requests.
            await asyncio.sleep(time.monotonic() - began)
        await self.remove_oldest()
        for _ in range(_MAX_TRIMS):
            if await self._journal.trim() <= _FREE:
                break
            await asyncio.sleep(_PAUSE)

    async def sweep(self) -> int:
        """Archive one batch, and return its number of sessions."""
        await self._undo_interrupted()
        batch = await self._batch()
        async with AsyncExitStack() as stack:
            sessions = {each.row.id: await self._sessions.by_id(each.row.id) for each in batch}
            for id in sorted(sessions):
                # In the order of their ids, like replays and deletions, to avoid a deadlock.
                await stack.enter_async_context(sessions[id].lock)
            batch = [each for each in batch if sessions[each.row.id].row == each.row]
            return await self._archive(batch) if batch else 0

    async def _archive(self, batch: list[NumberedRow]) -> int:
        about = self._about | {"written_at": time.time()}
        writer = await asyncio.to_thread(ArchiveWriter, self._folder, self._sessions.rank, about)
        try:
            moved = await self._write(writer, batch)
            if moved:
                await self._move(writer, moved)
                log.info("archived %d sessions", len(moved))
            return len(moved)
        finally:
            await asyncio.to_thread(writer.abandon)

    async def remove_oldest(self) -> None:
        """Remove the oldest archives until the others are within the limit."""
        limit = await asyncio.to_thread(self.limit)
        if self.bytes <= limit:
            return
        for file in await asyncio.to_thread(list_archives, self._folder, self._sessions.rank):
            if self.bytes <= limit:
                break
            async with self._files:
                size = await asyncio.to_thread(_size, file)
                ids = await asyncio.to_thread(sessions_in, file, log.warning)
                ids = await archived_of(self._journal, ids)
                await self._journal.commit(EraseContent(tuple(ids)))
                self._sessions.mark_content(ids, "deleted")
                await asyncio.to_thread(remove_file, file.path)
                self.bytes -= size
            self.removed += len(ids)
            log.warning(
                "the archives had more than %d bytes (sessions.archive_bytes): %s is removed with "
                "its %d sessions, the oldest",
                limit,
                file.path.name,
                len(ids),
            )

    async def remove(self, session_id: str) -> None:
        """Remove a session, whose lock is held, from the archives."""
        number = await self._journal.number(session_id)
        async with self._files:
            for file in list_archives(self._folder, self._sessions.rank):
                if number is not None and file.first <= number <= file.last:
                    gone = await asyncio.to_thread(remove_from, file, {session_id}, log.warning)
                    # Read after the await: a sweep may have added a file meanwhile.
                    self.bytes -= gone

    async def _batch(self) -> list[NumberedRow]:
        found = await self._journal.ended(
            before=time.time() - self.keep_seconds,
            oldest_step=self._oldest_step(),
            limit=BATCH + len(self._unreadable),
        )
        return [each for each in found if each.row.id not in self._unreadable]

    async def _write(self, writer: ArchiveWriter, batch: list[NumberedRow]) -> list[str]:
        """Write sessions until the file is full, and return their ids."""
        moved: list[str] = []
        for each in batch:
            try:
                stored = await self._journal.interactions(each.row.id)
                rewards = await self._journal.rewards(each.row.id)
                calls = [one.interaction for one in stored]
                line = await asyncio.to_thread(record_line, each.number, each.row, rewards, calls)
            except (AnyAgentError, ValueError, TypeError, RecursionError) as error:
                if isinstance(error, AnyAgentError) and error.retryable:
                    raise
                # Later sweeps leave it out, so that it does not delay other sessions again.
                log.error(
                    "session %s cannot be archived and stays in the journal: %s", each.row.id, error
                )
                self._unreadable.add(each.row.id)
                continue
            await asyncio.to_thread(writer.add, each.number, line)
            moved.append(each.row.id)
            if writer.raw > BATCH_BYTES:
                break
        return moved

    async def _move(self, writer: ArchiveWriter, ids: list[str]) -> None:
        """Move the file to its place, then remove its sessions from the journal."""
        await self._journal.commit(PutMeta(_INTENT, writer.name))
        size = await asyncio.to_thread(writer.finish)
        total = {"sessions": self.sessions + len(ids)}
        await self._journal.commit(
            ArchiveContent(tuple(ids)), PutMeta(_INTENT, None), PutMeta(_TOTALS, total)
        )
        self.sessions, self.bytes = total["sessions"], self.bytes + size
        self._sessions.mark_content(ids, "archived")

    async def _undo_interrupted(self) -> None:
        """Remove a file whose sessions the journal still has."""
        name = await self._journal.meta(_INTENT)
        if name is not None:
            # A failed write may reappear after a crash, but not once a later one is on disk.
            await self._journal.commit(PutMeta(_INTENT, name))
            log.info("archiving was interrupted: %s is removed, and its sessions go on", name)
            await asyncio.to_thread(remove_file, self._folder / name)
            await self._journal.commit(PutMeta(_INTENT, None))


def _size(file: ArchiveFile) -> int:
    """Return the bytes of a file; 0 for one that the deletion of its last session removed."""
    return file.path.stat().st_size if file.path.exists() else 0


async def archived_of(journal: Journal, ids: Iterable[str]) -> list[str]:
    """Return the sessions whose content is in an archive.

    Others of these ids may live: where ids are derived (`rollout.deterministic`), an archive of a
    lost journal has the ids of the next one's sessions.
    """
    rows = [await journal.session(id) for id in ids]
    return [row.id for row in rows if row is not None and row.content == "archived"]
