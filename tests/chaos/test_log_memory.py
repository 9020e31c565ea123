"""The memory of a log's Redis: bounded by what is in no snapshot, however long a rank works."""

from __future__ import annotations

import asyncio
import itertools
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from any_agent.errors import StoreUnavailable
from any_agent.types import SessionState
from proxy_ext.journal import (
    ArchiveContent,
    Journal,
    PutInteraction,
    PutSession,
    SetReward,
    SetState,
    Statement,
    log_keeper,
)
from tests.chaos.conftest import Figure
from tests.support.journal import make_interaction, make_row
from tests.support.redis_journal import Machine
from tests.support.redis_server import RedisServer

AGENTS = 64
TURNS = 10
TEXT = "a word of some " * 650
"""The text that makes a call's record one of 10 KB."""


class Watch:
    """Samples the server's memory and the log's length in a thread; keeps the highest."""

    def __init__(self, server: RedisServer) -> None:
        self.memory = 0
        self.before = 0
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        with self._server.client() as client:
            self.before = client.info("memory")["used_memory"]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with self._server.client() as client:
            while not self._over.wait(0.05):
                self.memory = max(self.memory, client.info("memory")["used_memory"])


@pytest.mark.timeout(1800)
async def test_redis_memory_stays_bounded_over_an_hour_of_load(
    tmp_path: Path, long: bool, figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour's calls of a rank (50 a second), as fast as they can be written.

    The short form has a twentieth of them, and snapshots of a sixteenth of the size.
    """
    calls = 180_000 if long else 9_000
    if not long:
        for name, size in (("_SNAPSHOT_BYTES", 4 << 20), ("_MAX_SNAPSHOT_BYTES", 16 << 20)):
            monkeypatch.setattr(log_keeper, name, size)
        monkeypatch.setattr(log_keeper, "_SNAPSHOT_CHECK", 0.1)
    # Commits go on while a snapshot is written: beside small ones that counts.
    bound = 2 * log_keeper._MAX_SNAPSHOT_BYTES + (0 if long else 6 << 20)
    with RedisServer(tmp_path / "redis", "--appendfsync", "no") as server, Watch(server) as watch:
        journal = Machine(tmp_path, server.url, "a").open(durability="everysec")
        log = journal.keeper.log  # type: ignore[union-attr]
        sessions = itertools.count()
        await asyncio.gather(*(work(journal, sessions, calls // TURNS) for _ in range(AGENTS)))
        written = log.appended_bytes  # type: ignore[attr-defined]
        await journal.close()
    used = watch.memory - watch.before
    figure(
        f"{calls} calls, {written / 1e6:.0f} MB of commits: at most {used / 1e6:.0f} MB of Redis "
        f"(bound {bound / 1e6:.0f} MB)"
    )
    assert written > 2 * bound
    assert used < bound


async def work(journal: Journal, sessions: itertools.count[int], count: int) -> None:
    """Lead sessions through their lives, and archive them."""
    done: list[str] = []
    while (number := next(sessions)) < count:
        id = f"s{number}"
        await commit(journal, PutSession(make_row(id)))
        for turn in range(TURNS):
            call = make_interaction(f"{id}-{turn}", id)
            call.output_message = {"role": "assistant", "content": TEXT}
            await commit(journal, PutInteraction(call, b"key"))
        await commit(
            journal,
            SetReward(id, None, None, 1.0, "me", 1.0, 1.0),
            SetState((id,), SessionState.TRAINED, None, "trainer", number, 2.0),
        )
        done.append(id)
        if len(done) == 10:
            await commit(journal, ArchiveContent(tuple(done)))
            done = []


async def commit(journal: Journal, *statements: Statement) -> None:
    """Write them; on a machine with much to do, Redis may take too long for an answer."""
    for _ in range(20):
        with suppress(StoreUnavailable):
            return await journal.commit(*statements)
        await asyncio.sleep(0.2)
    await journal.commit(*statements)
