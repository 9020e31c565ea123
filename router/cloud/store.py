"""The runs of all accounts, in SQLite: what is acknowledged is on disk."""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from any_agent.errors import StartupError
from any_agent.runtime.atomic_files import owner_only

Wish = Literal["serve", "stop", "delete"]

FORMAT = 1
_TABLES = """
CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    account TEXT NOT NULL,
    experiment TEXT NOT NULL,
    trial TEXT NOT NULL,
    model TEXT NOT NULL,
    preset TEXT NOT NULL,
    settings TEXT NOT NULL,
    wish TEXT NOT NULL,
    created_at REAL NOT NULL,
    UNIQUE (account, experiment, trial)
) STRICT
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an account."""

    account: str
    experiment: str
    trial: str
    model: str
    preset: str
    settings: dict[str, Any]
    """The account's own settings, by dotted names."""
    wish: Wish = "serve"
    """``serve``: requests start it; ``stop``: its owner stopped it; ``delete``: it is being
    removed."""
    created_at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    """Eight hexadecimal digits, with which the lanes of its session keys begin."""

    @property
    def name(self) -> str:
        """``account/experiment/trial``"""
        return f"{self.account}/{self.experiment}/{self.trial}"


class RunStore:
    """The table of runs, with a copy in memory that is read without waiting.

    A change is in the copy once it is on disk. Open it by :meth:`open`, in the event loop's thread.
    """

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._thread = thread
        self.runs: dict[str, Run] = {}
        """All runs by id, the oldest first."""
        self._committing: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, folder: Path) -> RunStore:
        """Open the table in a folder; StartupError for one of another format."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="runs")
        loop = asyncio.get_running_loop()
        try:
            connection = await loop.run_in_executor(thread, _connect, folder)
            store = cls(connection, thread)
            store.runs = await loop.run_in_executor(thread, _read, connection)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return store

    async def put(self, run: Run) -> None:
        """Add a run, or store its change."""
        row = (run.id, run.account, run.experiment, run.trial, run.model, run.preset)
        rest = (json.dumps(run.settings), run.wish, run.created_at)
        marks = ", ".join("?" * (len(row) + len(rest)))
        # Nothing else of a run changes; another run of its name is an error.
        statement = (
            f"INSERT INTO runs VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET wish = excluded.wish"
        )
        await self._commit(statement, (*row, *rest), lambda: self.runs.update({run.id: run}))

    async def remove(self, run: Run) -> None:
        """Remove a run."""
        await self._commit(
            "DELETE FROM runs WHERE id = ?", (run.id,), lambda: self.runs.pop(run.id, None)
        )

    def of_account(self, account: str) -> list[Run]:
        """Return an account's runs, the oldest first, without those that are being removed."""
        runs = [r for r in self.runs.values() if r.account == account and r.wish != "delete"]
        return sorted(runs, key=lambda run: run.created_at)

    def named(self, account: str, experiment: str, trial: str) -> Run | None:
        """Return the run of this name, also one that is being removed; None without one."""
        name = (account, experiment, trial)
        found = (r for r in self.runs.values() if (r.account, r.experiment, r.trial) == name)
        return next(found, None)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown(wait=False)

    async def _commit(
        self, statement: str, values: tuple[Any, ...], then: Callable[[], object]
    ) -> None:
        def commit() -> None:
            with self._connection:
                self._connection.execute(statement, values)

        async def commit_and_copy() -> None:
            await asyncio.get_running_loop().run_in_executor(self._thread, commit)
            then()

        # Shielded: a client that leaves must not leave the copy behind the disk.
        committing = asyncio.create_task(commit_and_copy())
        self._committing.add(committing)
        committing.add_done_callback(self._committing.discard)
        await asyncio.shield(committing)


def wishing(run: Run, wish: Wish) -> Run:
    """Return the run with another wish."""
    return replace(run, wish=wish)


def _connect(folder: Path) -> sqlite3.Connection:
    path = folder / "cloud.sqlite"
    with open(path, "ab", opener=owner_only):
        pass
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found not in (0, FORMAT):
        connection.close()
        raise StartupError(f"{path} is of format {found}, this version reads {FORMAT}")
    if found == 0:
        with connection:
            connection.execute(_TABLES)
            connection.execute(f"PRAGMA user_version = {FORMAT}")
    return connection


def _read(connection: sqlite3.Connection) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    columns = "id, account, experiment, trial, model, preset, settings, wish, created_at"
    for id, *names, settings, wish, created_at in connection.execute(
        f"SELECT {columns} FROM runs ORDER BY created_at"
    ):
        account, experiment, trial, model, preset = names
        given = json.loads(settings)
        runs[id] = Run(account, experiment, trial, model, preset, given, wish, created_at, id)
    return runs
