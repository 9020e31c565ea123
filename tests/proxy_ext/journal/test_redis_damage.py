"""A start names what it finds damaged, or another's, in Redis and in the run's folder, and
overwrites nothing of it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from any_agent.errors import StartupError
from proxy_ext.journal.statements import set_place
from tests.support.redis_journal import Machine, begun, elsewhere, ids, log_key, put, stop
from tests.support.redis_server import RedisServer


def change(snapshot: Path, work: Callable[[sqlite3.Connection], object]) -> None:
    with closing(sqlite3.connect(snapshot)) as connection, connection:
        work(connection)


SPOILT: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, 5000),
    "overwritten": lambda path: path.write_bytes(
        path.read_bytes()[:16384] + b"\xa5" * 49152 + path.read_bytes()[65536:]
    ),
    "later": lambda path: change(path, lambda c: c.execute("PRAGMA user_version = 99")),
    "empty": lambda path: path.write_bytes(b""),
    "another run's": lambda path: change(path, lambda c: set_place(c, "another", 1)),
}


async def lost_machine(folder: Path, server: RedisServer) -> Path:
    """A machine that is lost after three sessions; return the run's snapshot."""
    journal = await begun(folder, server.url, "s1", "s2", "s3")
    stop(journal)
    (snapshot,) = (folder / "runs").rglob("*.snapshot")
    return snapshot


def head(server: RedisServer) -> dict[bytes, bytes]:
    """All of the head but the lease, which a try to start may take."""
    with server.client() as client:
        found: dict[bytes, bytes] = client.hgetall(log_key(server).replace(b":log", b":head"))
    lease = (b"owner", b"until", b"turn")
    return {name: value for name, value in found.items() if name not in lease}


@pytest.mark.parametrize("how", SPOILT)
async def test_a_damaged_snapshot_is_named_and_kept(
    tmp_path: Path, server: RedisServer, how: str
) -> None:
    snapshot = await lost_machine(tmp_path, server)
    whole, before = snapshot.read_bytes(), head(server)
    SPOILT[how](snapshot)
    spoilt = snapshot.read_bytes()
    for _ in range(2):
        with pytest.raises(StartupError) as refused:
            await asyncio.to_thread(Machine(tmp_path, server.url, "b").open)
        assert "snapshot" in refused.value.message or "99" in refused.value.message
    assert snapshot.read_bytes() == spoilt
    assert head(server) == before
    # Put back from a backup, it loses nothing.
    snapshot.write_bytes(whole)
    assert await elsewhere(tmp_path, server.url, "c") == ["s1", "s2", "s3"]


STRANGE: list[Callable[[Any, bytes, bytes], Any]] = [
    lambda client, head, log: client.set(head, "another program's"),
    lambda client, head, log: client.hset(head, mapping={"seq": "many"}),
    lambda client, head, log: client.hset(head, mapping={"run": "another", "base": "7"}),
    lambda client, head, log: client.hset(head, mapping={"turn": "never"}),
    lambda client, head, log: (client.delete(log), client.set(log, "another program's")),
    lambda client, head, log: client.xadd(log, {"x": "another program's"}),
    lambda client, head, log: client.xadd(log, {"d": b"\xc1 no msgpack"}),
]


@pytest.mark.parametrize("strange", STRANGE, ids=range(len(STRANGE)))
async def test_another_programs_keys_are_named_and_kept(
    tmp_path: Path, server: RedisServer, strange: Callable[[Any, bytes, bytes], Any]
) -> None:
    await lost_machine(tmp_path, server)
    log = log_key(server)
    name = log.replace(b":log", b":head")
    with server.client() as client:
        client.hset(name, mapping={"until": "0"})
        strange(client, name, log)
        before = client.dump(log)
    with pytest.raises(StartupError) as refused:
        await asyncio.to_thread(Machine(tmp_path, server.url, "b").open)
    assert name.decode() in refused.value.message or "snapshot" in refused.value.message
    with server.client() as client:
        assert client.dump(log) == before


async def test_a_clock_that_is_off_by_minutes_gives_no_rank_away(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases are judged by the server's clock alone."""
    journal = Machine(tmp_path, server.url, "a").open()
    real = time.time
    for minutes in (10, -10):
        monkeypatch.setattr(time, "time", lambda off=60 * minutes: real() + off)
        with pytest.raises(StartupError):
            await asyncio.to_thread(Machine(tmp_path, server.url, "b").open)
        await put(journal, f"s{minutes}")
    assert await ids(journal) == ["s10", "s-10"]
    await journal.close()
    assert await elsewhere(tmp_path, server.url) == ["s10", "s-10"]
