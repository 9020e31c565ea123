"""The Redis of a job: a real server, started as the job's first node starts it."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import redis
from pydantic import SecretStr

from any_agent.config import JOURNAL_VARIABLE, Config, load_config
from any_agent.errors import ConfigError
from any_agent.launcher.process import SupervisedProcess
from any_agent.launcher.slurm import job_redis
from any_agent.launcher.slurm.job_redis import (
    new_url,
    redis_command,
    redis_folder,
    redis_ready,
    require_alone,
    require_redis,
)
from any_agent.launcher.trial import trial_dir
from proxy_ext.journal.redis_server import LogOptions, ServerCheck, connect
from tests.support.errors import fails_with
from tests.support.launcher.children import until
from tests.support.redis_server import require_redis as require_program

Start = Callable[[Config], SupervisedProcess]


def configured(tmp_path: Path, *settings: str) -> Config:
    own = [f"root={tmp_path / 'runs'}", f"server.journal_dir={tmp_path / 'disk'}", "model.path=m"]
    return load_config(None, [*own, "cluster.redis=true", *settings], environ={})


def with_url(config: Config, url: SecretStr) -> Config:
    server = config.server.model_copy(update={"journal": url})
    return config.model_copy(update={"server": server})


def url_in(config: Config) -> str:
    assert config.server.journal is not None
    return config.server.journal.get_secret_value()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the server of these settings, as a part of a node, and wait for it."""
    require_program()
    begun: list[SupervisedProcess] = []

    def begin(config: Config) -> SupervisedProcess:
        run = trial_dir(config)
        run.create()
        secrets = {JOURNAL_VARIABLE: url_in(config)}
        command = replace(redis_command(run), secrets=secrets)
        process = SupervisedProcess("redis", command, tmp_path / "redis.log")
        begun.append(process)
        process.start()
        until(lambda: redis_ready(config) or not process.running, 30)
        return process

    yield begin
    for process in begun:
        process.stop(grace=5)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_jobs_redis_is_a_server_that_a_journal_accepts(
    start: Start, tmp_path: Path, host: str
) -> None:
    try:
        url = new_url(host)
    except ConfigError:
        pytest.skip(f"this machine has no {host}")
    config = with_url(configured(tmp_path), url)
    process = start(config)
    assert process.running, process.last_lines()
    server = config.server
    options = LogOptions(url_in(config), "log", server.journal_lease, server.journal_durability, 0)
    check = ServerCheck(options)
    with connect(options.server, check) as client:
        promise = check.first(client)
        assert "on the server's disk before it is acknowledged" in promise
    stranger = options.server.replace("//:", "//:not-")
    with redis.Redis.from_url(stranger) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_what_was_acknowledged_outlives_the_jobs_redis(start: Start, tmp_path: Path) -> None:
    """Also with another port and password, as the job's next start has them."""
    config = with_url(configured(tmp_path), new_url("127.0.0.1"))
    process = start(config)
    with redis.Redis.from_url(url_in(config)) as client:
        client.set("key", "value")
    process.kill()
    until(lambda: not process.running)
    later = with_url(config, new_url("127.0.0.1"))
    assert url_in(later) != url_in(config)
    assert start(later).running
    with redis.Redis.from_url(url_in(later)) as client:
        assert client.get("key") == b"value"


def test_nobody_is_shown_the_password_of_redis(start: Start, tmp_path: Path) -> None:
    config = with_url(configured(tmp_path), new_url("127.0.0.1"))
    password = url_in(config).split("@")[0].rpartition(":")[2]
    assert len(password) >= 32
    process = start(config)
    server = psutil.Process(process.pid)
    assert server.name().startswith("redis-server")
    assert password not in " ".join(server.cmdline())
    assert JOURNAL_VARIABLE not in server.environ()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if password.encode() in path.read_bytes()] == []
    (file,) = redis_folder(trial_dir(config)).rglob("*.incr.aof")
    assert file.stat().st_mode & 0o077 == 0


def test_a_port_that_is_taken_is_named(start: Start, tmp_path: Path) -> None:
    config = with_url(configured(tmp_path), new_url("127.0.0.1"))
    port = int(url_in(config).rpartition(":")[2].partition("/")[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        process = start(config)
        assert not process.running
    assert f"127.0.0.1:{port}: bind: Address already in use" in process.last_lines()


def test_a_url_and_a_server_of_the_job_contradict_each_other(tmp_path: Path) -> None:
    require_alone(configured(tmp_path))
    require_alone(load_config(None, ["server.journal=redis://host/0"], environ={}))
    both = configured(tmp_path, "server.journal=redis://:secret@host/0")
    with fails_with(ConfigError, "cluster.redis", "server.journal") as it:
        require_alone(both)
    assert "secret" not in it.value.message


def test_a_node_without_the_program_or_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    require_redis(config, "n1")
    monkeypatch.setattr(job_redis, "find_spec", lambda name: None)
    with fails_with(ConfigError, "any-agent-rl[redis]"):
        require_redis(config, "n1")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    with fails_with(ConfigError, "redis-server", "n1"):
        require_redis(config, "n1")


def test_the_folder_of_redis_is_for_its_owner_alone(tmp_path: Path) -> None:
    config = configured(tmp_path)
    run = trial_dir(config)
    run.create()
    redis_command(run)
    assert redis_folder(run).stat().st_mode & 0o777 == 0o700
