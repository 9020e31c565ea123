"""The registry in Redis: without a folder that all see, over outages, and beside the folder's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from any_agent.config import load_config
from any_agent.rundir.redis_registry import RedisEntries
from any_agent.rundir.registry import Heartbeat, Registry, RegistryEntry, publish
from any_agent.rundir.store_beside import store_beside
from tests.support.launcher.children import until
from tests.support.redis_fixtures import server
from tests.support.redis_server import RedisServer

__all__ = ["server"]

RUN = "me/experiment/trial"


def entry(version: int = 0, boot_id: str = "one") -> RegistryEntry:
    return RegistryEntry(
        name="rank-0", boot_id=boot_id, url="http://127.0.0.1:1", pid=1, version=version
    )


@pytest.fixture
def stores(server: RedisServer) -> Iterator[Callable[[], RedisEntries]]:
    made: list[RedisEntries] = []

    def make() -> RedisEntries:
        made.append(RedisEntries(server.url, RUN))
        return made[-1]

    yield make
    for store in made:
        store.close()


def version(reader: Registry) -> int | None:
    reader.refresh()
    found = reader.get("rank-0")
    return None if found is None else found.version


def test_parts_with_different_folders_see_each_other(
    tmp_path: Path, stores: Callable[[], RedisEntries], server: RedisServer
) -> None:
    writer = stores()
    writer.write(entry(1))
    readers = [Registry(tmp_path / name, stores()) for name in ("here", "there")]
    for reader in readers:
        until(lambda reader=reader: version(reader) == 1)
        assert reader.alive("rank-0")
    before = [reader.heard("rank-0") for reader in readers]
    # The same content again is a sign of life, and comes by the channel at once.
    writer.write(entry(1))
    writer.write(entry(2))
    for reader, heard in zip(readers, before, strict=True):
        until(lambda reader=reader: version(reader) == 2)
        assert reader.heard("rank-0") > heard
    with server.client() as client:
        (key,) = client.keys()
        assert key == b"any-agent:{me/experiment/trial}:registry"
        assert 3500 < client.ttl(key) <= 3600


def test_a_server_that_hangs_or_is_away_holds_no_beat_up_and_ends_no_part(
    tmp_path: Path, stores: Callable[[], RedisEntries], server: RedisServer
) -> None:
    writer, reader = stores(), Registry(tmp_path, stores())
    writer.write(entry(1))
    until(lambda: version(reader) == 1)
    server.pause()
    began = time.monotonic()
    for _ in range(10):
        writer.write(entry(1))
    assert time.monotonic() - began < 2
    server.kill()
    began = time.monotonic()
    for _ in range(20):
        writer.write(entry(2))
    assert time.monotonic() - began < 5, "a beat waits for no server that is away"
    assert version(reader) == 1, "the last good copy is kept"
    # What the folder has counts meanwhile, and no older copy from Redis hides it.
    publish(tmp_path, entry(3))
    assert version(reader) == 3
    server.start()
    until(lambda: writer.write(entry(4)) is None and version(reader) == 4)


def test_entries_of_an_earlier_service_are_forgotten(
    tmp_path: Path, stores: Callable[[], RedisEntries]
) -> None:
    store = stores()
    store.write(entry())
    store.forget()
    reader = Registry(tmp_path, stores())
    assert version(reader) is None
    time.sleep(0.5)
    assert version(reader) is None


def test_garbage_in_the_hash_is_no_entry(
    tmp_path: Path, stores: Callable[[], RedisEntries], server: RedisServer
) -> None:
    with server.client() as client:
        key = f"any-agent:{{{RUN}}}:registry"
        client.hset(key, mapping={"rank-0": b"\xff", "rank-1": b"1 {}", b"\xfe": b"12 x"})
        reader, writer = Registry(tmp_path, stores()), stores()
        reader.refresh()
        time.sleep(0.3)
        client.publish(key, b"\xff\xff")
    writer.write(entry(5))
    until(lambda: version(reader) == 5)
    assert [found.name for found in reader.entries()] == ["rank-0"]


async def test_a_heartbeat_writes_to_the_folder_and_to_redis(
    tmp_path: Path, stores: Callable[[], RedisEntries]
) -> None:
    heartbeat = Heartbeat(tmp_path, lambda: entry(6), stores())
    await heartbeat.begin()
    only = Registry(tmp_path / "elsewhere", stores())
    both = Registry(tmp_path, stores())
    until(lambda: version(only) == version(both) == 6)
    await heartbeat.end()
    until(lambda: version(only) is not None and not only.alive("rank-0"))
    found = only.get("rank-0")
    assert found is not None
    assert found.state == "stopping"


def test_a_wrong_password_is_reported_without_showing_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, server: RedisServer
) -> None:
    url = f"redis://:secret-word@127.0.0.1:{server.port}/0"
    with server.client() as client:
        client.config_set("requirepass", "another")
    store = RedisEntries(url, RUN)
    store.write(entry())
    assert "is away" in caplog.text
    assert "secret-word" not in caplog.text


def test_only_a_journal_in_redis_makes_a_registry_in_redis(tmp_path: Path) -> None:
    plain = load_config(None, [f"root={tmp_path}"], environ={})
    assert store_beside(plain) is None
    logged = load_config(None, [f"root={tmp_path}", "server.journal=redis://h:1/0"], environ={})
    assert isinstance(store_beside(logged), RedisEntries)
