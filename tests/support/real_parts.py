"""Real processes: the embedded engine and ``python -m proxy_ext`` with LiteLLM."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import yaml

START = 120.0


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ANY_AGENT_")}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


def await_url(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=10).status_code == 200:
                return
        time.sleep(0.05)


@contextlib.contextmanager
def process(
    log: Path, *arguments: str, open_files: int | None = None, **more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m ...`` with more in its environment, ended with the context.

    ``open_files``: the most files that it may open, which it cannot raise.
    """
    with open(log, "ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(**more),
        )
    if open_files is not None:
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (open_files, open_files))
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(60)
        child.kill()
        child.wait()


@contextlib.contextmanager
def embedded_engine(model: Path, port: int, folder: Path) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    log = folder / "engine.log"
    arguments = ["--model-path", str(model), "--port", str(port)]
    with process(log, "any_agent.engine.embedded", *arguments) as child:
        await_url(f"{url}/health", child, log)
        yield url


def write_config(folder: Path, model: Path, **sections: object) -> Path:
    path = folder / "config.yaml"
    data = {
        "root": str(folder / "runs"),
        "model": {"path": str(model), "enable_thinking": False},
        "sessions": {"group_size": 1},
        **sections,
    }
    path.write_text(yaml.safe_dump(data))
    return path


@contextlib.contextmanager
def proxy_process(
    config: Path, engine_url: str, port: int
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A rank's proxy, ready; and its URL."""
    url = f"http://127.0.0.1:{port}"
    log = config.parent / "proxy.log"
    arguments = ["--config", str(config), "--engine-url", engine_url, "--port", str(port)]
    with process(log, "proxy_ext", *arguments, "--training") as child:
        await_url(f"{url}/healthz", child, log)
        yield child, url
