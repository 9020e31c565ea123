"""Shared parts of the benchmarks: processes, their CPU and memory, medians, a line on the machine.

The figures of interest are CPU seconds of one process, not wall time: other load on the machine
then changes them little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

RATIOS: dict[str, float] = {}
"""Ours over a peer's figure of the same run, by name: lower is better."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that every benchmark has."""
    lines = (doc or "").splitlines()
    made = argparse.ArgumentParser(description=lines[0] if lines else "")
    made.add_argument("--quick", action="store_true", help="fewer rounds")
    made.add_argument(
        "--smoke", action="store_true", help="take seconds, to show that it runs at all"
    )
    made.add_argument("--json", type=Path, help="write the ratios to this file, too")
    return made


def ratio(name: str, ours: float, peer: float) -> None:
    """Record a ratio of two figures of this run."""
    RATIOS[name] = ours / peer


def finish(arguments: argparse.Namespace) -> None:
    """Write the ratios that :func:`ratio` recorded to the requested file."""
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(RATIOS) + "\n")


def cpu_seconds(pid: int) -> float:
    """Return the user + system time of a process with all threads, without its children."""
    try:
        # The kernel's clock of that process (clock_getcpuclockid), to the nanosecond.
        return time.clock_gettime(((~pid) << 3) | 2)
    except OSError:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)


def resident_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 2**20


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def machine() -> str:
    """Return the date, interpreter and cores, for a line beside a table."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {cores} cores"


@contextlib.contextmanager
def child(
    command: list[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    program: str = sys.executable,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``PROGRAM COMMAND`` with its output in ``log``; end it with the context."""
    with open(log, "ab") as out:
        process = subprocess.Popen(
            [program, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_up(
    process: subprocess.Popen[bytes], url: str, log: Path, timeout: float = 120.0
) -> None:
    """Return once ``url`` answers 200; RuntimeError with the log's end if that does not happen."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(url, timeout=2) as response,
        ):
            if response.status == 200:
                return
        time.sleep(0.1)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise RuntimeError(f"{url} did not come up:\n{tail}")
