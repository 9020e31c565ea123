"""The runs of all accounts and the stored answers, in SQLite: what is acknowledged is on disk."""

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
from typing import Any, Literal, TypeAlias

from any_agent.errors import StartupError
from any_agent.runtime.atomic_files import owner_only

Wish = Literal["serve", "stop", "delete"]

FORMAT = 3
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
CREATE TABLE answers (
    caller TEXT NOT NULL,
    route TEXT NOT NULL,
    key TEXT NOT NULL,
    request_hash BLOB NOT NULL,
    status INTEGER NOT NULL,
    body BLOB NOT NULL,
    shown_key TEXT,
    created_at REAL NOT NULL,
    PRIMARY KEY (caller, route, key)
) STRICT;
CREATE INDEX answers_by_time ON answers (created_at);
CREATE TABLE usage (
    run TEXT NOT NULL,
    part TEXT NOT NULL,
    day TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    sessions INTEGER NOT NULL,
    trained_tokens INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    PRIMARY KEY (run, part, day)
) STRICT;
CREATE TABLE stays (
    id TEXT PRIMARY KEY,
    run TEXT NOT NULL,
    began_at REAL NOT NULL,
    seconds REAL NOT NULL,
    gpus INTEGER NOT NULL
) STRICT;
CREATE INDEX stays_by_run ON stays (run);
CREATE TABLE billed (
    run TEXT PRIMARY KEY,
    account TEXT NOT NULL,
    experiment TEXT NOT NULL,
    trial TEXT NOT NULL,
    created_at REAL NOT NULL
) STRICT;
CREATE INDEX billed_by_account ON billed (account);
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
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


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request with an `Idempotency-Key`."""

    caller: str
    route: str
    """Method and path."""
    key: str
    request_hash: bytes
    status: int
    body: bytes
    """JSON."""
    shown_key: str | None
    """The id of the account's key whose text was in the answer, and is not in ``body``."""
    created_at: float
    """Seconds of the answers' clock."""


SQL: TypeAlias = tuple[str, tuple[Any, ...]]
_ANSWER = ", ".join(Answer.__dataclass_fields__)


class RunStore:
    """The table of runs, with a copy in memory that is read without waiting, and that of answers.

    A change is in the copy once it is on disk. Open it by :meth:`open`, in the event loop's thread.
    """

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._thread = thread
        self.runs: dict[str, Run] = {}
        """All runs by id, the oldest first."""
        self._of_account: dict[str, dict[str, Run]] = {}
        self._used_ids: set[str] = set()
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
            store._used_ids.update(id for (id,) in await store.read("SELECT run FROM billed", ()))
        except sqlite3.DatabaseError as error:
            thread.shutdown(wait=False)
            raise StartupError(
                f"{folder / FILE} cannot be read ({error}): restore it from a copy"
            ) from None
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return store

    async def add(self, run: Run, answer: Answer | None = None) -> None:
        """Store a new run, and with it the answer to the request for it; sqlite3.IntegrityError if
        its id or its name is taken."""
        values = (run.id, run.account, run.experiment, run.trial, run.model, run.preset)
        rest = (json.dumps(run.settings), run.wish, run.created_at)
        marks = ", ".join("?" * (len(values) + len(rest)))
        insert = (f"INSERT INTO runs VALUES ({marks})", (*values, *rest))
        # It stays when the run goes: its bill is the account's.
        billed = (run.id, run.account, run.experiment, run.trial, run.created_at)
        bill = ("INSERT INTO billed VALUES (?, ?, ?, ?, ?)", billed)
        await self.commit(lambda: self._put(run), insert, bill, *_kept(answer))

    async def change(self, run: Run, wish: Wish, answer: Answer | None = None) -> bool:
        """Store a wish, and with it the answer to it; return False, and change nothing, for a run
        that is being removed."""
        # The present one, as another change may have come between.
        return await self.commit(
            lambda: self._put(replace(self.runs[run.id], wish=wish)),
            ("UPDATE runs SET wish = ? WHERE id = ? AND wish != 'delete'", (wish, run.id)),
            *_kept(answer),
        )

    async def remove(self, run: Run) -> None:
        """Remove a run."""
        drop = ("DELETE FROM runs WHERE id = ?", (run.id,))
        await self.commit(lambda: self._drop(run), drop)

    # -- answers -------------------------------------------------------------------------------

    async def answer(self, caller: str, route: str, key: str) -> Answer | None:
        """Return the stored answer to a request; None without one."""
        rows = await self.read(
            f"SELECT {_ANSWER} FROM answers WHERE caller = ? AND route = ? AND key = ?",
            (caller, route, key),
        )
        return Answer(*rows[0]) if rows else None

    async def answers_of(self, caller: str) -> int:
        """Return the number of stored answers to a caller's requests."""
        sql = "SELECT COUNT(*) FROM answers WHERE caller = ?"
        return int((await self.read(sql, (caller,)))[0][0])

    async def keep(self, answer: Answer) -> None:
        """Store an answer by itself, in place of an earlier one of its request."""
        await self.commit(lambda: None, *_kept(answer))

    async def drop_answers(self, before: float) -> None:
        """Delete the answers created before then, by their own clock."""
        drop = ("DELETE FROM answers WHERE created_at < ?", (before,))
        await self.commit(lambda: None, drop)

    async def forget_answers(self, callers: list[str]) -> None:
        """Delete the answers to these callers."""
        drop = (
            "DELETE FROM answers WHERE caller IN (SELECT value FROM json_each(?))",
            (json.dumps(callers),),
        )
        await self.commit(lambda: None, drop)

    async def meta(self, name: str) -> Any:
        """Return a named JSON value, or None."""
        rows = await self.read("SELECT value FROM meta WHERE name = ?", (name,))
        return json.loads(rows[0][0]) if rows else None

    async def put_meta(self, name: str, value: Any) -> None:
        put = ("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, json.dumps(value)))
        await self.commit(lambda: None, put)

    async def drop_meta(self, name: str) -> None:
        await self.commit(lambda: None, ("DELETE FROM meta WHERE name = ?", (name,)))

    # -- the copy ------------------------------------------------------------------------------

    def _put(self, run: Run) -> None:
        self.runs[run.id] = run
        self._used_ids.add(run.id)
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
        """Return an id that no run has, nor one of those that were removed and have a bill."""
        while (id := secrets.token_hex(4)) in self._used_ids:
            pass
        return id

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown(wait=False)

    async def read(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        def read() -> list[tuple[Any, ...]]:
            return self._connection.execute(sql, values).fetchall()

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    async def commit(self, then: Callable[[], None], first: SQL, *others: SQL) -> bool:
        """Commit statements and change the copy; return False, and commit nothing, if the first
        one changes no row."""

        def commit() -> bool:
            with self._connection:
                if self._connection.execute(*first).rowcount < 1:
                    return False
                for statement in others:
                    self._connection.execute(*statement)
            return True

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


def _kept(answer: Answer | None) -> tuple[SQL, ...]:
    if answer is None:
        return ()
    values = tuple(getattr(answer, name) for name in Answer.__dataclass_fields__)
    marks = ", ".join("?" * len(values))
    return ((f"INSERT OR REPLACE INTO answers ({_ANSWER}) VALUES ({marks})", values),)


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
