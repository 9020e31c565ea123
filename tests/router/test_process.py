"""``python -m router``: how it starts, what it says, how it ends."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from any_agent.config import load_config
from any_agent.keys import KeySigner
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.registry import RegistryEntry, publish
from any_agent.runtime.ports import reserve
from tests.support.real_parts import await_url, environment, write_config
from tests.support.router import FakeRank

pytestmark = pytest.mark.service

SECRET = "operator-secret-4711"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tmp_path, server={"ranks": 1})


def command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "router", "--config", str(config), *arguments]


def run(config: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A start that is expected to fail."""
    return subprocess.run(
        command(config, *arguments),
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(**env),
    )


@contextmanager
def running(
    config: Path, *arguments: str, **env: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A router on a port that stays reserved, as the launcher's does; and its URL."""
    log = config.parent / "router.log"
    with closing(reserve("127.0.0.1", 0)) as reserved, open(log, "wb") as out:
        port = reserved.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        process = subprocess.Popen(
            command(config, "--host", "127.0.0.1", "--port", str(port), *arguments),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(**env),
        )
        try:
            await_url(f"{url}/healthz", process, log)
            yield process, url
        finally:
            process.kill()
            process.wait()


def test_a_host_that_others_reach_needs_a_key(config: Path) -> None:
    ended = run(config, "--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 2
    assert "server.admin_key" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_in_use(config: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ended = run(config, "--host", "127.0.0.1", "--port", port)
    assert ended.returncode == 2
    assert f"127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_bad_configuration_ends_with_2_and_the_key(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path, servr={"ranks": 1})
    ended = run(config, "--host", "127.0.0.1", "--port", "0")
    assert ended.returncode == 2
    assert "servr" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_it_is_told_to(config: Path, number: signal.Signals) -> None:
    with running(config) as (process, url), httpx.Client(base_url=url) as http:
        # A connection that is kept open holds nobody up.
        assert http.get("/readyz").status_code == 503
        process.send_signal(number)
        assert process.wait(60) == 0
    assert "Traceback" not in (config.parent / "router.log").read_text()


def test_it_comes_back_on_its_port_after_a_kill(config: Path) -> None:
    with closing(reserve("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
        log = config.parent / "router.log"
        for _ in range(3):
            with open(log, "wb") as out:
                arguments = ["--host", "127.0.0.1", "--port", str(port)]
                process = subprocess.Popen(
                    command(config, *arguments), stdout=out, stderr=out, env=environment()
                )
            try:
                await_url(f"http://127.0.0.1:{port}/healthz", process, log)
            finally:
                process.kill()
                process.wait()


def test_it_tells_its_public_url(config: Path) -> None:
    with running(config, "--public-url", "https://rl.example.org") as (process, _):
        path = trial_dir(load_config(config, environ={})).registry / "router.json"
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        entry = RegistryEntry.model_validate_json(path.read_bytes())
        assert (entry.url, entry.pid) == ("https://rl.example.org", process.pid)


async def test_what_it_logs_holds_no_key(tmp_path: Path) -> None:
    """With everything logged, over a rank that dies and malformed requests."""
    config = write_config(tmp_path, tmp_path, server={"ranks": 1}, log_level="debug")
    run_dir = trial_dir(load_config(config, environ={}))
    run_dir.create()
    rank = FakeRank()
    await rank.start()
    publish(run_dir.registry, rank.entry())
    key = KeySigner(run_dir.signing_secret()).mint(0)[1]
    with running(config, ANY_AGENT_SERVER__ADMIN_KEY=SECRET) as (_, url):
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": SECRET}):
                await http.get(f"/{key}/v1/models", headers=headers)
                await http.get("/v1/models", headers=headers | {"X-Large": f"{key}" * 5000})
            await rank.kill()
            waiting = asyncio.create_task(http.post("/v1/x", headers={"x-api-key": key}))
            await asyncio.sleep(0)
            await rank.start()
            publish(run_dir.registry, rank.entry())
            await waiting
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(f"GET /{key} nonsense\r\nAuthorization: {SECRET}\x01\r\n\r\n".encode())
        await reader.read()
        writer.close()
    await rank.kill()
    text = await asyncio.to_thread((tmp_path / "router.log").read_text)
    assert "rank 0" in text
    assert key not in text
    assert key[:20] not in text
    assert SECRET not in text
