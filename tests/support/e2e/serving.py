"""`any-agent serve` as a user starts it: its own process, known by its output, ended by Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

CLI = [sys.executable, "-m", "any_agent.cli"]
START_TIMEOUT = 400.0
"""Seconds until a service listens: more than it gives its own engines, so that it says why not."""


def environment(**more: str) -> dict[str, str]:
    """This process's, without settings of ours."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ANY_AGENT_")}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


def run_cli(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A command that is expected to end by itself."""
    return subprocess.run(
        [*CLI, *arguments],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=540,
    )


class Served:
    """A running service."""

    def __init__(self, process: subprocess.Popen[str], output: Path, url: str) -> None:
        self.process = process
        self.output = output
        self.url = url

    @property
    def children(self) -> list[psutil.Process]:
        """Every process that it started, and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def interrupt(self, timeout: float) -> int:
        """Ctrl-C; the exit code."""
        return self.signal(signal.SIGINT, timeout)

    def signal(self, number: signal.Signals, timeout: float) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextlib.contextmanager
def serve(
    *arguments: str, cwd: Path, within: float = START_TIMEOUT, in_background: bool = False
) -> Iterator[Served]:
    """`any-agent serve` in ``cwd``, once it listens; fails if that takes longer than ``within``.

    ``in_background``: with SIGINT ignored, as scripts' shells start background jobs.
    """
    inherited = signal.SIG_IGN if in_background else signal.SIG_DFL
    output = cwd / "serve.out"
    with open(output, "w") as out:
        process = subprocess.Popen(
            [*CLI, "serve", *arguments],
            cwd=cwd,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, inherited),
        )
    try:
        yield Served(process, output, _url(process, output, within))
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[str], output: Path, within: float) -> str:
    deadline = time.monotonic() + within
    while True:
        for line in output.read_text().splitlines():
            if "INFO: any-agent server listening at " in line:
                return line.rpartition(" ")[2]
        text = output.read_text()
        assert process.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
