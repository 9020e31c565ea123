"""A journal with its log in Redis: a real server, killed, filled, emptied, paused, and shared."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from any_agent.errors import StartupError, StoreFull, StoreUnavailable
from proxy_ext.journal import PutInteraction, PutMeta, open_journal
from tests.support.errors import fails_with
from tests.support.journal import make_interaction
from tests.support.journal_contract import check_journal
from tests.support.redis_journal import (
    Machine,
    begun,
    elsewhere,
    ids,
    log_key,
    put,
    stop,
    until_written,
)
from tests.support.redis_server import RedisServer


async def test_redis_keeps_the_journals_contract(
    tmp_path: Path, shared_server: RedisServer
) -> None:
    machine = Machine(tmp_path, shared_server.url, "a")
    await check_journal(machine.open)


async def test_another_machine_restores_everything_from_redis(
    tmp_path: Path, shared_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (Machine(tmp_path, shared_server.url, name) for name in "ab")
    journal = first.open()
    await put(journal, "s1", "s2")
    interaction = make_interaction("i1", "s1")
    await journal.commit(PutInteraction(interaction, key=b"k"), PutMeta("run", {"step": 3}))
    await journal.close()
    journal = second.open()
    assert await ids(journal) == ["s1", "s2"]
    (stored,) = await journal.interactions("s1")
    assert stored.key == b"k"
    assert stored.interaction.output_ids.tolist() == interaction.output_ids.tolist()
    await put(journal, "s3")
    await journal.close()
    assert "outdated" not in caplog.text
    assert not second.run.journal(0).with_name("rank-0.sqlite.outdated").exists()
    # The first machine's file is older than the log's home: it is made again.
    journal = first.open()
    assert await ids(journal) == ["s1", "s2", "s3"]
    assert await journal.meta("run") == {"step": 3}
    await journal.close()


async def test_an_append_without_an_answer_is_undone(tmp_path: Path, server: RedisServer) -> None:
    """The server runs it after its caller was told that nothing was recorded. Reads do not wait."""
    journal = await begun(tmp_path, server.url, "s1")
    server.pause()
    write = asyncio.create_task(put(journal, "unanswered"))
    await asyncio.sleep(0.1)
    for _ in range(20):
        assert await ids(journal) == ["s1"]
    assert not write.done()
    with pytest.raises(StoreUnavailable):
        await write
    server.go_on()
    await until_written(journal, "s2")
    assert await ids(journal) == ["s1", "s2"]
    await journal.close()
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2"]


async def test_a_cancelled_write_is_over_when_its_caller_is(
    tmp_path: Path, server: RedisServer
) -> None:
    """Otherwise a read of the same caller, which overtakes writes, could miss it."""
    journal = Machine(tmp_path, server.url, "a").open()
    client: Any = journal.keeper.log.client  # type: ignore[union-attr]
    send, started, go = client.evalsha, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        if threading.current_thread().name == "journal":
            started.set()
            assert go.wait(20)
        return send(*arguments)

    client.evalsha = slow
    write = asyncio.create_task(put(journal, "s1"))
    assert await asyncio.to_thread(started.wait, 20)
    write.cancel()
    asyncio.get_running_loop().call_later(0.2, go.set)
    with pytest.raises(asyncio.CancelledError):
        await write
    assert await ids(journal) == ["s1"]
    await journal.close()


async def test_a_full_server_loses_nothing_acknowledged(
    tmp_path: Path, server: RedisServer
) -> None:
    journal = await begun(tmp_path, server.url, "s1")
    with server.client() as client:
        client.config_set("maxmemory", "1mb")
        with pytest.raises(StoreFull):
            await put(journal, "s2")
        assert journal.stats.full
        assert await ids(journal) == ["s1"]
        client.config_set("maxmemory", "0")
    await put(journal, "s3")
    assert not journal.stats.full
    await journal.close()
    assert await elsewhere(tmp_path, server.url) == ["s1", "s3"]


async def test_an_emptied_server_lets_no_other_machine_begin_with_nothing(
    tmp_path: Path, server: RedisServer
) -> None:
    """Another machine does not begin with nothing: it names the last home."""
    first, second = (Machine(tmp_path, server.url, name) for name in "ab")
    journal = await begun(tmp_path, server.url, "s1")
    await journal.close()
    server.flush()
    with fails_with(StartupError, "gone"):
        second.open()
    assert await elsewhere(tmp_path, server.url, "a") == ["s1"]
    journal = second.open()
    await put(journal, "s2")
    await journal.close()
    server.flush()
    # The first machine still has a file, but not everything.
    with fails_with(StartupError, "gone"):
        first.open()


async def test_a_trimmed_log_is_refused(tmp_path: Path, server: RedisServer) -> None:
    stop(await begun(tmp_path, server.url, "s1", "s2", "s3"))
    with server.client() as client:
        client.xtrim(log_key(server), maxlen=1, approximate=False)
    with fails_with(StartupError, "commit 1", "3"):
        await elsewhere(tmp_path, server.url)


async def test_a_journal_written_without_redis_goes_on_in_redis(
    tmp_path: Path, server: RedisServer
) -> None:
    """Before the log began, and while it was not used."""
    machine = Machine(tmp_path, server.url, "a")
    for alone, logged in (("s1", "s2"), ("s3", "s4")):
        journal = open_journal(machine.run.journal_url(0))
        await put(journal, alone)
        await journal.close()
        journal = machine.open()
        await put(journal, logged)
        if logged == "s2":
            await journal.close()
    stop(journal)
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2", "s3", "s4"]
