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
FILE = "cloud.sqlite"
_TABLES = f"""
BEGIN;
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
) STRICT;
PRAGMA user_version = {FORMAT};
COMMIT;
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an account."""

    id: str
    """Eight hexadecimal digits, with which the lanes of its session keys begin."""
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
        self._of_account: dict[str, dict[str, Run]] = {}
        self._committing: set[asyncio.Task[bool]] = set()

    @classmethod
    async def open(cls, folder: Path) -> RunStore:
        """Open the table in a folder; StartupError for one of another format."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="runs")
        loop = asyncio.get_running_loop()
        try:
            connection = await loop.run_in_executor(thread, _connect, folder)
            store = cls(connection, thread)
            for run in await loop.run_in_executor(thread, _read, connection):
                store._put(run)
        except sqlite3.DatabaseError as error:
            thread.shutdown(wait=False)
            raise StartupError(
                f"{folder / FILE} cannot be read ({error}): restore it from a copy"
            ) from None
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return store

    async def add(self, run: Run) -> None:
        """Store a new run; sqlite3.IntegrityError if its id or its name is taken."""
        values = (run.id, run.account, run.experiment, run.trial, run.model, run.preset)
        rest = (json.dumps(run.settings), run.wish, run.created_at)
        marks = ", ".join("?" * (len(values) + len(rest)))
        await self._commit(
            f"INSERT INTO runs VALUES ({marks})", (*values, *rest), lambda: self._put(run)
        )

    async def change(self, run: Run, wish: Wish) -> bool:
        """Store a wish; return False, and change nothing, for a run that is being removed."""
        # The present one, as another change may have come between.
        return await self._commit(
            "UPDATE runs SET wish = ? WHERE id = ? AND wish != 'delete'",
            (wish, run.id),
            lambda: self._put(replace(self.runs[run.id], wish=wish)),
        )

    async def remove(self, run: Run) -> None:
        """Remove a run."""
        await self._commit("DELETE FROM runs WHERE id = ?", (run.id,), lambda: self._drop(run))

    def _put(self, run: Run) -> None:
        self.runs[run.id] = run
        self._of_account.setdefault(run.account, {})[run.id] = run

    def _drop(self, run: Run) -> None:
        del self.runs[run.id]
        own = self._of_account[run.account]
        del own[run.id]
        if not own:
            del self._of_account[run.account]

    def of_account(self, account: str) -> list[Run]:
        """Return an account's runs, the oldest first, without those that are being removed."""
        own = self._of_account.get(account, {}).values()
        return [run for run in own if run.wish != "delete"]

    def removing(self, account: str) -> bool:
        """Return whether a run of the account is being removed."""
        return any(run.wish == "delete" for run in self._of_account.get(account, {}).values())

    def named(self, account: str, experiment: str, trial: str) -> Run | None:
        """Return the run of this name, also one that is being removed; None without one."""
        own = self._of_account.get(account, {}).values()
        return next((r for r in own if (r.experiment, r.trial) == (experiment, trial)), None)

    def free_id(self) -> str:
        """Return an id that no run has."""
        while (id := secrets.token_hex(4)) in self.runs:
            pass
        return id

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown(wait=False)

    async def _commit(
        self, statement: str, values: tuple[Any, ...], then: Callable[[], None]
    ) -> bool:
        """Commit a statement and change the copy; return whether it has changed a row."""

        def commit() -> bool:
            with self._connection:
                return self._connection.execute(statement, values).rowcount > 0

        async def commit_and_copy() -> bool:
            changed = await asyncio.get_running_loop().run_in_executor(self._thread, commit)
            if changed:
                then()
            return changed

        # Shielded: a client that leaves must not leave the copy behind the disk.
        committing = asyncio.create_task(commit_and_copy())
        self._committing.add(committing)
        committing.add_done_callback(self._committing.discard)
        return await asyncio.shield(committing)


def _connect(folder: Path) -> sqlite3.Connection:
    path = folder / FILE
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
        connection.executescript(_TABLES)
    return connection


def _read(connection: sqlite3.Connection) -> list[Run]:
    columns = "id, account, experiment, trial, model, preset, settings, wish, created_at"
    runs = []
    for row in connection.execute(f"SELECT {columns} FROM runs ORDER BY created_at"):
        id, account, experiment, trial, model, preset, settings, wish, at = row
        given = json.loads(settings)
        runs.append(Run(id, account, experiment, trial, model, preset, given, wish, at))
    return runs
