"""Moves sessions that no resume needs from the journal into archives, a bounded batch at a time.

A batch is written to a file, whole and on disk, before one transaction of the journal lets go of
what is in it. Before the file gets its name, that name is in the journal, and the transaction takes
it out again: so whoever finds one there knows that its sessions are still in the journal, and
removes the file. Nothing is lost or kept twice, wherever a process is killed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from any_agent.errors import AnyAgentError
from proxy_ext.archive.files import (
    ArchiveWriter,
    list_archives,
    remove_file,
    remove_from,
    remove_partial,
)
from proxy_ext.archive.records import record_line
from proxy_ext.journal import ArchiveContent, NumberedRow, PutMeta, Statement
from proxy_ext.sessions.session_store import SessionStore

log = logging.getLogger(__name__)

_INTERVAL = (1.0, 900.0)
"""Seconds between two looks, each of which may make a file: a fiftieth of the time that content is
kept, but within these."""
_RETRY_DELAY = 30.0
"""Seconds at most to the first look, and to the next one after one that failed."""
_BATCH = 256
_BATCH_BYTES = 16 * 2**20
"""Of lines, before they are compressed: what one transaction removes holds up the writes behind it
for some milliseconds."""
_PAUSE = 0.05
_TRIMS = 256
"""At most so often in a row."""
_FREE = 4 * 2**20
"""Bytes of free space that the journal keeps for what comes next."""
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
    ) -> None:
        """``about`` is said at the top of each file."""
        self._sessions = sessions
        self._journal = sessions.journal
        self._folder = folder
        self._about = about
        self._keep = keep_seconds
        self._oldest_step = oldest_step
        self._unreadable: set[str] = set()
        self._files = asyncio.Lock()
        """Held by whoever takes a session out of one."""
        self.sessions = 0
        """Archived so far, in this trial."""
        self.bytes = 0
        """The files' size."""

    async def recover(self) -> None:
        """Begin with what the journal says; remove what a killed process was writing."""
        totals = await self._journal.meta(_TOTALS) or {}
        self.sessions, self.bytes = totals.get("sessions", 0), totals.get("bytes", 0)
        remove_partial(self._folder, self._sessions.rank)
        await self._settle()

    async def run(self) -> None:
        """Archive, and give space back, until cancelled."""
        usual = min(max(_INTERVAL[0], self._keep / 50), _INTERVAL[1])
        soon = min(usual, _RETRY_DELAY)
        wait = soon
        while True:
            await asyncio.sleep(wait)
            wait = soon
            try:
                await self._sweep_all()
                wait = usual
            except AnyAgentError as error:
                log.warning("archiving failed and will be tried again: %s", error.message)
            except OSError as error:
                log.warning("an archive cannot be written, sessions stay in the journal: %s", error)
            except Exception:
                log.exception("archiving failed and will be tried again")

    async def _sweep_all(self) -> None:
        while True:
            began = time.monotonic()
            if not await self.sweep():
                break
            # Half of the time is left to those who are served.
            await asyncio.sleep(time.monotonic() - began)
        for _ in range(_TRIMS):
            if await self._journal.trim() <= _FREE:
                break
            await asyncio.sleep(_PAUSE)

    async def sweep(self) -> int:
        """Archive one batch; how many sessions that was."""
        await self._settle()
        batch = await self._batch()
        async with AsyncExitStack() as stack:
            sessions = {each.row.id: await self._sessions.by_id(each.row.id) for each in batch}
            for id in sorted(sessions):
                # As whoever replays or deletes one: in the order of their ids.
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

    async def remove(self, session_id: str) -> list[Statement]:
        """Take a session out of the archives; what is to be written with its erasure.

        The caller holds its lock.
        """
        number = await self._journal.number(session_id)
        async with self._files:
            for file in list_archives(self._folder, self._sessions.rank):
                if number is not None and file.first <= number <= file.last:
                    gone = await asyncio.to_thread(remove_from, file, session_id, log.warning)
                    self.bytes -= gone
            return [self._totals()]

    async def _batch(self) -> list[NumberedRow]:
        found = await self._journal.ended(
            before=time.time() - self._keep,
            oldest_step=self._oldest_step(),
            limit=_BATCH + len(self._unreadable),
        )
        return [each for each in found if each.row.id not in self._unreadable]

    async def _write(self, writer: ArchiveWriter, batch: list[NumberedRow]) -> list[str]:
        """Write as many as one file takes; their ids."""
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
                # It is not to hold up the others, at each look again.
                log.error("session %s stays in the journal: %s", each.row.id, error)
                self._unreadable.add(each.row.id)
                continue
            await asyncio.to_thread(writer.add, each.number, line)
            moved.append(each.row.id)
            if writer.raw > _BATCH_BYTES:
                break
        return moved

    async def _move(self, writer: ArchiveWriter, ids: list[str]) -> None:
        """Put the file in its place, then remove its sessions from the journal."""
        await self._journal.commit(PutMeta(_INTENT, writer.name))
        size = await asyncio.to_thread(writer.finish)
        before = self.sessions, self.bytes
        self.sessions, self.bytes = self.sessions + len(ids), self.bytes + size
        try:
            await self._journal.commit(
                ArchiveContent(tuple(ids)), PutMeta(_INTENT, None), self._totals()
            )
        except BaseException:
            self.sessions, self.bytes = before
            raise
        self._sessions.mark_archived(ids)

    async def _settle(self) -> None:
        """Remove a file whose sessions the journal still has."""
        name = await self._journal.meta(_INTENT)
        if name is not None:
            # A failed write may show after a crash, but not once a later one is on disk.
            await self._journal.commit(PutMeta(_INTENT, name))
            log.info("archiving was interrupted; it begins again without %s", name)
            await asyncio.to_thread(remove_file, self._folder / name)
            await self._journal.commit(PutMeta(_INTENT, None))

    def _totals(self) -> PutMeta:
        return PutMeta(_TOTALS, {"sessions": self.sessions, "bytes": self.bytes})
