"""Kinds of Redis servers that a journal's log can have, and those that promise too little."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from any_agent.errors import ConfigError, StartupError, StoreUnavailable
from any_agent.rundir.redis_registry import RedisEntries
from any_agent.rundir.registry import RegistryEntry
from proxy_ext.journal import Journal
from proxy_ext.journal.redis_server import LogOptions, ServerCheck
from proxy_ext.web.quota_server import QuotaServer
from tests.support.errors import fails_with
from tests.support.ports import own_port
from tests.support.redis_journal import (
    Machine,
    begun,
    elsewhere,
    ids,
    log_key,
    put,
    stop,
    until_asked,
    until_written,
)
from tests.support.redis_server import RedisServer, make_cluster
from tests.support.waiting import until


@pytest.mark.service
async def test_no_write_is_acknowledged_without_the_replicas_that_are_wanted(
    tmp_path: Path, server: RedisServer
) -> None:
    machine = Machine(tmp_path, server.url, "a")
    with fails_with(ConfigError, "journal_replicas is 1", "has 0"):
        machine.open(replicas=1)
    follow = ("--replicaof", "127.0.0.1", str(server.port))
    with RedisServer(tmp_path / "replica", *follow) as replica:
        await until_asked(
            server, lambda client: client.info("replication")["connected_slaves"] == 1
        )
        with fails_with(ConfigError, "read-only replica"):
            Machine(tmp_path, replica.url, "a").open()
        journal = machine.open(replicas=1)
        await put(journal, "s1")
        replica.pause()
        with fails_with(StoreUnavailable, "0 of 1 replicas"):
            await put(journal, "alone")
        replica.go_on()
        await until_written(journal, "s2")
        await journal.close()
    assert await elsewhere(tmp_path, server.url) == ["s1", "s2"]


async def test_a_server_at_a_socket_is_used(tmp_path: Path) -> None:
    socket = tmp_path / "s"
    with RedisServer(tmp_path / "redis", "--unixsocket", str(socket)):
        journal = Machine(tmp_path, f"unix://{socket}", "a").open()
        await put(journal, "s1")
        await journal.close()


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("maxmemory-policy", "allkeys-lru", None),
        ("appendonly", "no", None),
        ("appendfsync", "everysec", {"durability": "everysec"}),
        ("requirepass", "secret-word", {}),
    ],
)
async def test_servers_that_promise_too_little_are_refused(
    tmp_path: Path, name: str, value: str, accepted: dict[str, str] | None
) -> None:
    with RedisServer(tmp_path / "redis", f"--{name}", value) as server:
        said = "login" if name == "requirepass" else f"{name} {value}"
        with fails_with((ConfigError, StartupError), said) as refused:
            Machine(tmp_path, server.url, "a").open()
        assert "secret-word" not in str(refused.value)
        if accepted is not None:
            url = server.url.replace("127", ":secret-word@127") if not accepted else server.url
            journal = Machine(tmp_path, url, "a").open(**accepted)
            await put(journal, "s1")
            await journal.close()


def test_a_server_that_is_too_old_or_strange_is_refused() -> None:
    check = ServerCheck(LogOptions("redis://:secret@host/0", "name", 5.0, "always", 0))

    def server_with(info: bytes) -> Any:
        answers = [info, {b"appendfsync": b"always"}]
        return SimpleNamespace(
            on_connect=lambda: None,
            send_command=lambda *_: None,
            read_response=lambda: answers.pop(0),
        )

    check(server_with(b"redis_version:7.0.15\r\naof_enabled:1\r\n"))
    assert "each commit is on the server's disk" in check.promise
    for info, message in (
        (b"redis_version:6.2.14\r\naof_enabled:1\r\n", "6.2.14"),
        (b"# Server\r\n", "understood"),
        (b"redis_version:seven\r\n", "understood"),
    ):
        with fails_with(redis.RedisError, message) as refused:
            check(server_with(info))
        assert "secret" not in str(refused.value)


async def test_a_server_that_does_not_run_is_named(tmp_path: Path, server: RedisServer) -> None:
    server.kill()
    with fails_with(StartupError, "127.0.0.1:", "/0", "running"):
        Machine(tmp_path, server.url, "a").open()


@pytest.mark.service
async def test_a_cluster_keeps_the_journal(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", "--cluster-enabled", "yes") as server:
        url = await asyncio.to_thread(make_cluster, server)
        journal = await begun(tmp_path, url, "s1", "s2")
        await journal.close()
        assert await elsewhere(tmp_path, url) == ["s1", "s2"]


@pytest.mark.service
async def test_a_journal_works_over_tls_with_the_least_permissions(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    port = own_port()
    settings = {
        "tls-port": str(port),
        "tls-cert-file": str(certificate),
        "tls-key-file": str(key),
        "tls-auth-clients": "no",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with RedisServer(tmp_path / "redis", *words) as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "rank", "on", ">secret-word", *permissions())
        url = f"rediss://rank:secret-word@127.0.0.1:{port}/0"
        with fails_with(StartupError, "certificate verify failed"):
            Machine(tmp_path, url, "a").open()
        url += f"?ssl_ca_certs={certificate}"
        journal = await begun(tmp_path, url, "s1", "s2")
        stop(journal)
        assert await elsewhere(tmp_path, url) == ["s1", "s2"]
        await count_quotas(url)
        await asyncio.to_thread(use_registry, url)
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "rank", "-info")
        with fails_with(StartupError, "login", "permission") as refused:
            Machine(tmp_path, url, "a").open()
        assert "secret-word" not in str(refused.value)


def permissions() -> list[str]:
    """Return those of docs/how-to/operate-redis.md."""
    text = (Path(__file__).parents[3] / "docs/how-to/operate-redis.md").read_text()
    return text.partition(">PASSWORD ")[2].partition("```")[0].split()


async def count_quotas(url: str) -> None:
    """Use each command of the scripts; the first rank's report is forgotten by the second's."""
    first, second = (QuotaServer(url, "run", rank, 1) for rank in (0, 1))
    used = first.rates("alice", per_second=5, wanted=1, tokens_per_second=5, spent=1)
    assert [answer.admitted for answer in await first.run([used])] == [1]
    await first.run([first.report("alice", held=1, wanted=0, limit=1, keep=60)])
    await asyncio.sleep(0.01)
    assert await second.run([second.report("alice", held=0, wanted=1, limit=1, keep=0.001)]) == [1]
    for each in (first, second):
        await each.close()


def use_registry(url: str) -> None:
    writer, reader = RedisEntries(url, "run"), RedisEntries(url, "run")
    try:
        writer.forget()
        reader.read()
        deadline = time.monotonic() + 15
        while not reader.read():
            assert time.monotonic() < deadline
            writer.write(RegistryEntry(name="rank-0", boot_id="one", url="http://h", pid=1))
            time.sleep(0.05)
    finally:
        reader.close()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 that vouches for itself, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    words = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=127.0.0.1"
    command = ["openssl", "req", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


async def test_writes_are_refused_while_a_restarted_server_promises_less(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    with server:
        journal = await begun(tmp_path, server.url, "s1")
        server.kill()
        with RedisServer(server.folder, "--appendfsync", "everysec", port=server.port):
            await until_refused(journal, "may lose its last second")
            assert await ids(journal) == ["s1"]
        server.start()
        await until_written(journal, "s2")
        stop(journal)
        assert await elsewhere(tmp_path, server.url) == ["s1", "s2"]


async def until_refused(journal: Journal, reason: str) -> None:
    """Write until the refusal has this reason: no write succeeds meanwhile."""

    async def refused() -> bool:
        with pytest.raises(StoreUnavailable) as found:
            await put(journal, "refused")
        await asyncio.sleep(0.1)
        return reason in str(found.value)

    await until(refused, reason)


@pytest.mark.service
async def test_a_failover_loses_nothing_acknowledged(tmp_path: Path) -> None:
    with pair_with_sentinel(tmp_path) as (one, two, url):
        journal = Machine(tmp_path, url, "a").open(replicas=1)
        await put(journal, "s1")
        one.kill()
        # The new master has no replica of its own: nothing is acknowledged until it has one.
        await asyncio.sleep(4)
        with RedisServer(tmp_path / "again", "--replicaof", "127.0.0.1", str(two.port)):
            await until_written(journal, "s2")
            await journal.close()
            journal = Machine(tmp_path, url, "b").open(replicas=1)
            assert await ids(journal) == ["s1", "s2"]
            await journal.close()


@pytest.mark.service
async def test_writes_are_refused_after_a_failover_to_a_server_that_promises_less(
    tmp_path: Path,
) -> None:
    with pair_with_sentinel(tmp_path, "--appendfsync", "everysec") as (one, two, url):
        journal = await begun(tmp_path, url, "s1")
        await until_asked(two, lambda client: client.exists(log_key(one)))
        one.kill()
        await until_refused(journal, "may lose its last second")
        with two.client() as client:
            client.config_set("appendfsync", "always")
        await until_written(journal, "s2")
        assert await ids(journal) == ["s1", "s2"]
        await journal.close()


@contextmanager
def pair_with_sentinel(
    folder: Path, *settings: str
) -> Iterator[tuple[RedisServer, RedisServer, str]]:
    """Run a master, its replica with further settings, and the Sentinel that has their URL."""
    with RedisServer(folder / "one") as one:
        follow = ("--replicaof", "127.0.0.1", str(one.port))
        conf = folder / "sentinel.conf"
        conf.write_text(
            f"sentinel monitor main 127.0.0.1 {one.port} 1\n"
            "sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 3000\n"
        )
        with RedisServer(folder / "two", *follow, *settings) as two, Sentinel(conf) as sentinel:
            deadline = time.monotonic() + 30
            while not sentinel.knows_replica():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield one, two, f"redis+sentinel://127.0.0.1:{sentinel.port}/main"


class Sentinel(RedisServer):
    def __init__(self, conf: Path) -> None:
        super().__init__(conf.parent / "sentinel", str(conf), "--sentinel")

    def command(self) -> list[str]:
        conf = self._settings[0]
        return ["redis-server", conf, "--sentinel", "--port", str(self.port), "--bind", "127.0.0.1"]

    def knows_replica(self) -> bool:
        with self.client() as client:
            try:
                return len(client.sentinel_slaves("main")) == 1
            except redis.RedisError:
                return False
