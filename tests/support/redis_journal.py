"""Journals with a log in Redis, each as on a machine of its own."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from any_agent.errors import StoreUnavailable
from any_agent.rundir import RunDir
from any_agent.runtime import boot_clock
from any_agent.types import SessionState
from proxy_ext.journal import Journal, PutSession, SQLiteJournal, open_journal
from tests.support.journal import make_row
from tests.support.redis_server import RedisServer
from tests.support.waiting import until

LEASE = 1.0


class Machine:
    """One of the machines that share a run's folder, each with a disk of its own."""

    def __init__(self, folder: Path, url: str, name: str) -> None:
        self.run = RunDir.of(folder / "runs", "user", "experiment", folder.name, folder / name)
        self._url = url

    def open(
        self, *, lease: float = LEASE, durability: str = "always", replicas: int = 0
    ) -> SQLiteJournal:
        url = self.run.logged_journal_url(
            0, self._url, lease=lease, durability=durability, replicas=replicas
        )
        journal = open_journal(url)
        assert isinstance(journal, SQLiteJournal)
        return journal


def be_machine(name: str) -> None:
    """Let this process run as on a machine of its own: no other sees whether its processes live."""
    socket.gethostname = lambda: name
    boot_clock.boot_id = lambda: name  # type: ignore[assignment]


def stop(journal: SQLiteJournal) -> None:
    """End its threads as a kill does: nothing is released."""
    keeper: Any = journal.keeper
    keeper.closed.set()
    for thread in keeper.threads:
        thread.join()


async def put(journal: Journal, *names: str) -> None:
    for name in names:
        await journal.commit(PutSession(make_row(name)))


async def begun(folder: Path, url: str, *names: str) -> SQLiteJournal:
    """Open the first machine's journal, and put sessions into it."""
    journal = Machine(folder, url, "a").open()
    await put(journal, *names)
    return journal


async def ids(journal: Journal) -> list[str]:
    return [row.id for row in await journal.sessions(list(SessionState))]


async def elsewhere(folder: Path, url: str, name: str = "b") -> list[str]:
    """Return the sessions that another machine finds."""
    journal = await asyncio.to_thread(Machine(folder, url, name).open)
    found = await ids(journal)
    await journal.close()
    return found


async def until_written(journal: Journal, name: str) -> None:
    """Write a session, once the server takes it."""

    async def written() -> bool:
        try:
            await put(journal, name)
        except StoreUnavailable:
            await asyncio.sleep(0.1)
            return False
        return True

    await until(written, f"the write of {name}")


def log_key(server: RedisServer) -> bytes:
    with server.client() as client:
        (key,) = (key for key in client.keys("*") if key.endswith(b":log"))
    return bytes(key)


async def until_asked(server: RedisServer, met: Callable[[Any], Any]) -> None:
    """Ask the server by a client until it is as wanted."""
    with server.client() as client:
        await until(lambda: met(client), "what was asked of Redis")


class Late:
    """A script of a log that does not arrive, until :meth:`arrive`."""

    def __init__(self, journal: SQLiteJournal, script: str) -> None:
        keeper: Any = journal.keeper
        self._client: Any = keeper.log.client
        self._real = self._client.evalsha
        self._sha = hashlib.sha1(script.encode()).hexdigest()
        self._call: tuple[Any, ...] = ()
        self._client.evalsha = self._keep

    def _keep(self, sha: str, *rest: Any) -> Any:
        if sha != self._sha:
            return self._real(sha, *rest)
        self._call = (sha, *rest)
        raise redis.TimeoutError("no answer")

    @property
    def called(self) -> bool:
        return bool(self._call)

    def restore(self) -> None:
        self._client.evalsha = self._real

    def arrive(self) -> None:
        self._real(*self._call)
