"""``python -m router``: how it starts, what it says, how it ends."""

from __future__ import annotations

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
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.registry import RegistryEntry
from any_agent.runtime.ports import reserve
from tests.support.real_parts import await_url, environment, write_config

pytestmark = pytest.mark.service


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, tmp_path, server={"ranks": 1})


def command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "router", "--config", str(config), *arguments]


def run(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A start that is expected to fail."""
    return subprocess.run(
        command(config, *arguments), capture_output=True, text=True, timeout=120, env=environment()
    )


@contextmanager
def running(config: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A router on a port that stays reserved, as the launcher's does; and its URL."""
    log = config.parent / "router.log"
    with closing(reserve("127.0.0.1", 0)) as reserved, open(log, "wb") as out:
        port = reserved.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        process = subprocess.Popen(
            command(config, "--host", "127.0.0.1", "--port", str(port), *arguments),
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
        try:
            await_url(f"{url}/healthz", process, log)
            yield process, url
        finally:
            process.kill()
            process.wait()


def test_a_start_that_cannot_be_ends_with_2_and_the_reason(config: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    wrong = write_config(tmp_path / "wrong", tmp_path, servr={"ranks": 1})
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        for file, host, port, why in (
            (config, "0.0.0.0", "0", "server.admin_key"),
            (config, "127.0.0.1", taken, f"127.0.0.1:{taken}"),
            (wrong, "127.0.0.1", "0", "servr"),
        ):
            ended = run(file, "--host", host, "--port", port)
            assert ended.returncode == 2
            assert why in ended.stderr
            assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_router_process_ends_when_it_is_told_to(config: Path, number: signal.Signals) -> None:
    with running(config) as (process, url), httpx.Client(base_url=url) as http:
        # A connection that is kept open holds nobody up.
        assert http.get("/readyz").status_code == 503
        process.send_signal(number)
        assert process.wait(60) == 0
    assert "Traceback" not in (config.parent / "router.log").read_text()


def test_the_router_process_tells_its_public_url(config: Path) -> None:
    with running(config, "--public-url", "https://rl.example.org") as (process, _):
        path = trial_dir(load_config(config, environ={})).registry / "router.json"
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        entry = RegistryEntry.model_validate_json(path.read_bytes())
        assert (entry.url, entry.pid) == ("https://rl.example.org", process.pid)
