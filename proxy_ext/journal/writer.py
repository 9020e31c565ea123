"""The thread that owns a journal's connection: group commit, and the meaning of failures.

It commits all writes that queued since its last commit in one transaction, so that concurrent calls
share an fsync; then it runs the queued reads: they see committed data only, do not fail with a
write, and never delay a checkpoint. A journal with a log in Redis has a second one for its reads,
which so wait for no server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from any_agent.errors import AnyAgentError, StoreBusy, StoreFull, StoreUnavailable
from any_agent.runtime.file_watcher import WatchedPath
from proxy_ext.journal.base import JournalStats
from proxy_ext.journal.files import mark_damaged
from proxy_ext.journal.statements import Line
from proxy_ext.journal.wal import UNSYNCED

log = logging.getLogger(__name__)

MAX_BATCH = 512
MAX_QUEUE = 16_384
_LOG_INTERVAL = 60.0  # seconds between log lines about a full disk or an absent log
_WIPE_TIMEOUT_MS = 200  # for which writes wait for other processes that read
WIPE_INTERVAL = 5.0  # seconds between tries to empty the log
_MIN_FREE_BYTES = 1 << 20  # a disk with less room counts as full, whatever a write's error is


@dataclass(slots=True, eq=False)
class JournalJob:
    """A function for the thread, and the future of its result."""

    run: Callable[[sqlite3.Connection], Any]
    writes: bool
    wipes: bool = False
    """A write whose removed content must be in no file when it is reported."""
    lazy: bool = False
    """A write that is reported before it is on the disk: it outlives the process, but a crash of
    the machine only if another write followed."""
    lines: Sequence[Line] = ()
    """The lines of a write, as a log takes them."""
    future: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class CommitLog(Protocol):
    """A log beside the file, which has every commit before the file has it."""

    stats: JournalStats

    def append(self, connection: sqlite3.Connection, lines: Sequence[Line], *, lazy: bool) -> bool:
        """Append the lines of a transaction; StoreUnavailable if they must not be committed.

        Returns whether it appended anything.
        """

    def withdraw(self) -> None:
        """Undo the last append, which the file did not commit."""


_Outcome: TypeAlias = tuple[JournalJob, Any, Exception | None]


class JournalThread:
    """Runs jobs in its thread until it is closed."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        stats: JournalStats,
        commit_log: CommitLog | None = None,
    ) -> None:
        self.connection = connection
        self._log = commit_log
        if commit_log is not None:
            commit_log.stats = stats
        self._path = path
        self._watched = WatchedPath(path)
        self._stats = stats
        self._queue: queue.SimpleQueue[JournalJob | None] = queue.SimpleQueue()
        self._closed = False
        self._full_logged = -math.inf
        self._unsynced = 0
        """Number of commits since the last synced one."""
        self._next_wipe: float | None = None
        """Time of the next try to empty the log; None if it is empty."""
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def submit(self, job: JournalJob) -> asyncio.Future[Any]:
        """Queue a job; StoreBusy if it will not be started."""
        if self._closed:
            raise StoreBusy("the journal is closed, as the service ends; try again", retry_after=2)
        if self._stats.lost is not None:
            raise StoreUnavailable(self._stats.lost, retry_after=1)
        if self._queue.qsize() >= MAX_QUEUE:
            raise StoreBusy("too many writes wait for the journal; try again", retry_after=1)
        self._queue.put(job)
        return job.future

    async def close(self) -> None:
        """Finish the queued jobs, then close the connection."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join, 30)

    def _work(self) -> None:
        while True:
            jobs = [self._queue.get()]
            while len(jobs) < MAX_BATCH and jobs[-1] is not None:
                try:
                    jobs.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            todo = [job for job in jobs if job is not None]
            self._write([job for job in todo if job.writes])
            self._read([job for job in todo if not job.writes])
            if jobs[-1] is None:
                with contextlib.suppress(sqlite3.Error):
                    self.connection.close()
                return

    def _write(self, jobs: list[JournalJob]) -> None:
        """Run all jobs in one transaction, and report none before the commit."""
        while jobs:
            try:
                results = self._transact(jobs)
            except _BadJob as bad:
                # The other jobs are tried again without it.
                self._fail([bad.job], bad.cause)
                jobs = [job for job in jobs if job is not bad.job]
            except Exception as cause:  # any error goes to the callers
                self._fail(jobs, cause)
                return
            else:
                # A small write may still fit where a large one does not.
                if self._stats.full and self._has_room():
                    self._stats.full = False
                    log.info("the journal %s can be written again", self._path)
                _report([(job, r, None) for job, r in zip(jobs, results, strict=True)])
                return

    def _transact(self, jobs: list[JournalJob]) -> list[Any]:
        connection = self.connection
        began = time.perf_counter()
        self._require_file()
        lazy = self._unsynced < UNSYNCED and all(job.lazy for job in jobs)
        eased = lazy and self._log is None
        try:
            if eased:
                connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            results = []
            for job in jobs:
                try:
                    results.append(job.run(connection))
                except Exception as cause:
                    if _fails_all_writes(cause):
                        raise
                    raise _BadJob(job, cause) from cause
            self._commit(jobs, lazy=lazy)
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            raise
        finally:
            if eased:
                connection.execute("PRAGMA synchronous = FULL")
        if self._log is None:
            # It may have gone meanwhile; a log has what was written.
            self._require_file()
        self._unsynced = self._unsynced + 1 if lazy else 0
        self._empty_wal(anew=any(job.wipes for job in jobs))
        self._stats.commit_seconds.observe(time.perf_counter() - began)
        self._stats.writes += len(jobs)
        return results

    def _commit(self, jobs: list[JournalJob], *, lazy: bool) -> None:
        appended = False
        if self._log is not None:
            lines = [line for job in jobs for line in job.lines]
            appended = self._log.append(self.connection, lines, lazy=lazy)
        try:
            self.connection.execute("COMMIT")
        except sqlite3.Error as cause:
            if self._log is not None and appended:
                self._log.withdraw()
            raise _UnsureCommit(str(cause)) from cause

    def _require_file(self) -> None:
        """Raise StoreUnavailable once nobody will find the file's commits under its name."""
        if self._stats.lost is None and self._watched.is_gone():
            self._stats.lost = (
                f"the journal {self._path} was removed, renamed or replaced while this rank used "
                "it: it acknowledges nothing any more, and ends"
            )
        if self._stats.lost is not None:
            raise StoreUnavailable(self._stats.lost, retry_after=1)

    def _empty_wal(self, *, anew: bool) -> None:
        """Empty the log, which has pages as they were before content was removed.

        A reader in another process can prevent it: then later writes try again.
        """
        due = self._next_wipe is not None and time.monotonic() >= self._next_wipe
        if not anew and not due:
            return
        execute, busy = self.connection.execute, 1
        with contextlib.suppress(sqlite3.Error):
            (usual,) = execute("PRAGMA busy_timeout").fetchone()
            execute(f"PRAGMA busy_timeout = {min(usual, _WIPE_TIMEOUT_MS)}")
            try:
                (busy, *_) = execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                execute(f"PRAGMA busy_timeout = {usual}")
        if busy and self._next_wipe is None:
            log.warning(
                "%s-wal still has erased content, as a reader uses it; later writes will remove it",
                self._path,
            )
        self._next_wipe = time.monotonic() + WIPE_INTERVAL if busy else None

    def _read(self, jobs: list[JournalJob]) -> None:
        outcomes: list[_Outcome] = []
        for job in jobs:
            try:
                outcomes.append((job, self._read_one(job), None))
            except AnyAgentError as error:
                outcomes.append((job, None, error))
            except Exception as cause:
                self._log_failure("read", cause)
                failure = StoreUnavailable("the journal cannot be read; try again", retry_after=5)
                outcomes.append((job, None, failure))
        _report(outcomes)

    def _read_one(self, job: JournalJob) -> Any:
        # All of its queries see one state: another connection may commit between them.
        self.connection.execute("BEGIN")
        try:
            return job.run(self.connection)
        finally:
            with contextlib.suppress(sqlite3.Error):  # an error may have ended it
                self.connection.execute("ROLLBACK")

    def _fail(self, jobs: list[JournalJob], cause: Exception) -> None:
        error = self._refusal(cause)
        self._stats.full = isinstance(error, StoreFull)
        self._log_failure("write", cause)
        _report([(job, None, error) for job in jobs])

    def _log_failure(self, kind: str, cause: Exception) -> None:
        now = time.monotonic()
        if _code_of(cause) == sqlite3.SQLITE_FULL or isinstance(cause, StoreUnavailable):
            # While the disk is full, or the log's server away, every write fails.
            if now < self._full_logged + _LOG_INTERVAL:
                return
            self._full_logged = now
        if is_damage(cause):
            mark_damaged(self._path)
        log.error("journal %s failed: %s%s", kind, cause, _advice(cause))

    def _refusal(self, cause: Exception) -> StoreUnavailable:
        if isinstance(cause, StoreUnavailable):
            return cause  # the log's
        unsure = isinstance(cause, _UnsureCommit)
        no_room = _code_of(cause) == sqlite3.SQLITE_IOERR and not self._has_room()
        if _code_of(cause) == sqlite3.SQLITE_FULL or (no_room and not unsure):
            return StoreFull(
                "the journal's disk is full; nothing was recorded; try again when there is space",
                retry_after=10,
            )
        if unsure:
            return StoreUnavailable(
                "the journal's disk failed; the change is not recorded now, but may be after a "
                "crash: check it before you try again",
                retry_after=5,
            )
        return StoreUnavailable(
            "the journal cannot be written; nothing was recorded; try again later", retry_after=5
        )

    def _has_room(self) -> bool:
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return True
        return disk.f_bavail * disk.f_frsize >= _MIN_FREE_BYTES


class _BadJob(Exception):
    """The failure of one job, not of the transaction around it."""

    def __init__(self, job: JournalJob, cause: Exception) -> None:
        super().__init__(str(cause))
        self.job = job
        self.cause = cause


class _UnsureCommit(Exception):
    """The failure of the commit itself: its writes may be on the disk."""


_JOB_ERRORS = frozenset(
    {
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_MISUSE,
        sqlite3.SQLITE_RANGE,
        sqlite3.SQLITE_TOOBIG,
    }
)


def _fails_all_writes(cause: Exception) -> bool:
    """Return whether every other write would fail as well."""
    code = _code_of(cause)
    return code is not None and code not in _JOB_ERRORS


def _code_of(cause: Exception) -> int | None:
    """Return SQLite's primary result code; None without one."""
    origin = cause.__cause__ if isinstance(cause, _UnsureCommit) else cause
    extended: int | None = getattr(origin, "sqlite_errorcode", None)
    return None if extended is None else extended & 0xFF


def is_damage(cause: Exception) -> bool:
    """Return whether an error means that the file is damaged."""
    # Python's module reports a broken text without a code.
    no_text = isinstance(cause, sqlite3.OperationalError) and "decode to UTF-8" in str(cause)
    return no_text or _code_of(cause) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _advice(cause: Exception) -> str:
    if _code_of(cause) == sqlite3.SQLITE_FULL:
        return ": calls are answered with 507 until there is space on its disk"
    if is_damage(cause):
        return ": restart the proxy, which sets the file aside and saves what can be read"
    return ""


def _report(outcomes: list[_Outcome]) -> None:
    """Set the futures, all of a loop at once: each wake-up of a loop costs a system call."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].future.get_loop(), []).append(outcome)
    for loop, reported in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, reported)
        except RuntimeError:
            log.debug("the event loop ended before a journal write was reported")


def _settle(outcomes: list[_Outcome]) -> None:
    for job, result, error in outcomes:
        if job.future.done():
            continue  # the caller was cancelled
        if error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)
