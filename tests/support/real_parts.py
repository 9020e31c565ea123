"""Real processes: the embedded engine and ``python -m proxy_ext`` with LiteLLM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import httpx
import yaml

START = 240.0
T = TypeVar("T")


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ANY_AGENT_")}
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **more}


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
    except BaseException as error:
        if child.poll() is not None:
            # A client sees only that its connection is closed.
            end = log.read_text(errors="replace")[-4000:]
            error.add_note(f"{arguments[0]} had ended ({child.returncode}):\n{end}")
        raise
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
    config: Path, engine_url: str, port: int, *more: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A rank's proxy, ready; and its URL."""
    url = f"http://127.0.0.1:{port}"
    log = config.parent / "proxy.log"
    arguments = ["--config", str(config), "--engine-url", engine_url, "--port", str(port)]
    with process(log, "proxy_ext", *arguments, "--training", *more) as child:
        await_url(f"{url}/healthz", child, log)
        yield child, url


@contextlib.asynccontextmanager
async def in_a_thread(context: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a context beside the event loop."""
    entered = await asyncio.to_thread(context.__enter__)
    try:
        yield entered
    except BaseException as error:
        if not await asyncio.to_thread(context.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await asyncio.to_thread(context.__exit__, None, None, None)
