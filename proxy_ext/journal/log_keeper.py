"""The lease of a journal's log, and the snapshots that replace its commits."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing

from any_agent.runtime.atomic_files import create_empty, fsync, make_folder
from any_agent.runtime.redis_client import FAILURES
from proxy_ext.journal.redis_log import RedisLog
from proxy_ext.journal.redis_server import Places
from proxy_ext.journal.statements import place_of

log = logging.getLogger(__name__)

# A snapshot replaces the commits once they have the size of the journal's file, within these: it
# costs about as much as they did, and Redis needs no more memory than twice that.
_SNAPSHOT_BYTES = 64 << 20
_MAX_SNAPSHOT_BYTES = 256 << 20
SNAPSHOT_PAUSE = 10.0  # seconds from a snapshot to one for another reason, or after a failure
_SNAPSHOT_CHECK = 1.0  # seconds between looks at the size
_LOG_INTERVAL = 60.0  # seconds between lines about the same failure


class LogKeeper:
    """Renews the lease of a log, and replaces commits by snapshots, until it is closed."""

    def __init__(self, journal_log: RedisLog, places: Places) -> None:
        self.log = journal_log
        self._places = places
        self._snapshot_bytes = 0
        self._next_snapshot = time.monotonic() + SNAPSHOT_PAUSE
        # What an earlier process appended may have content that it erased since.
        self._due = True
        self.closed = threading.Event()
        self.threads: list[threading.Thread] = []
        self._logged: dict[str, float] = {}

    def renew(self) -> None:
        """Renew the lease from now on."""
        interval = self.log.options.lease / 3
        self._run("journal-lease", interval, self.log.renew)

    def start(self) -> None:
        """Take snapshots from now on."""
        self._run("journal-snapshots", _SNAPSHOT_CHECK, self._snapshot_if_due)

    def wipe(self) -> None:
        """Let a snapshot soon replace the commits, as content was removed from them."""
        self._due = True

    def close(self, *, snapshot: bool = True) -> None:
        """Replace the commits by a last snapshot, and let another process have the rank."""
        self.closed.set()
        for thread in self.threads:
            thread.join(30)
        if self.threads and self.log.stats.lost is None:
            if snapshot:
                self._try("the last snapshot", self.take)
            self._try("the release of the lease", self.log.release)
        self.log.close()

    def _run(self, name: str, interval: float, work: Callable[[], None]) -> None:
        def run() -> None:
            while not self.closed.wait(interval) and self.log.stats.lost is None:
                self._try(name, work)

        self.threads.append(threading.Thread(target=run, name=name, daemon=True))
        self.threads[-1].start()

    def _try(self, what: str, work: Callable[[], None]) -> None:
        """Do it; a failure is logged, and whatever it is, the thread goes on."""
        try:
            work()
        except Exception as error:
            now = time.monotonic()
            if now >= self._logged.get(what, 0.0):
                self._logged[what] = now + _LOG_INTERVAL
                expected = isinstance(error, (*FAILURES, sqlite3.Error))
                log.warning(
                    "%s of %s failed: %s", what, self.log.where, error, exc_info=not expected
                )

    def _snapshot_if_due(self) -> None:
        size = self._places.file.stat().st_size
        limit = min(max(_SNAPSHOT_BYTES, size), _MAX_SNAPSHOT_BYTES)
        grown = self.log.appended_bytes - self._snapshot_bytes >= limit
        due = self._due and time.monotonic() >= self._next_snapshot
        if self.log.needs_seed or grown or due:
            self.take()

    def take(self) -> None:
        # Read first: while it is set nothing is appended, so that the copy has everything.
        seeds = self.log.needs_seed
        self._due, self._snapshot_bytes = False, self.log.appended_bytes
        self._next_snapshot = time.monotonic() + SNAPSHOT_PAUSE
        try:
            name, seq = take_snapshot(self._places)
            (self.log.seed if seeds else self.log.trim)(seq, name)
        except BaseException:
            self._due = True
            raise
        remove_older(self._places, name)


def take_snapshot(places: Places) -> tuple[str, int]:
    """Copy the file as it is now; return the copy's name, and the last commit that it has."""
    make_folder(places.snapshots)
    with closing(sqlite3.connect(places.file, isolation_level=None)) as old:
        old.execute("BEGIN")
        _, seq = place_of(old)
        name = f"{places.file.stem}.{seq}.snapshot"
        partial = places.snapshots / f".partial-{name}"
        partial.unlink(missing_ok=True)
        create_empty(partial)
        # Nobody else opens it, so that it needs no locks, which a shared folder may not have.
        with closing(sqlite3.connect(f"{partial.as_uri()}?nolock=1", uri=True)) as new:
            new.execute("PRAGMA journal_mode = OFF")
            new.execute("PRAGMA synchronous = OFF")
            old.backup(new)
    fsync(partial)
    partial.replace(places.snapshots / name)
    fsync(places.snapshots)
    return name, seq


def remove_older(places: Places, name: str) -> None:
    """Remove a journal's snapshots but this one, and what a killed process left of others."""
    journal = places.file.stem
    for pattern in (f"{journal}.*.snapshot", f".partial-{journal}.*.snapshot"):
        for path in places.snapshots.glob(pattern):
            if path.name != name:
                path.unlink(missing_ok=True)
