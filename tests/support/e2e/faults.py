"""The faults of a soak: each kind in one interval of twenty, one after another, from one seed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from any_agent.launcher import Node
from tests.support.e2e.killing import Kill
from tests.support.e2e.wire import Wire

PARTS = ("proxy", "engine", "router", "trainer")
KINDS = (
    *(f"kill {part}" for part in PARTS),
    *(f"term {part}" for part in PARTS),
    *(f"stop {part}" for part in PARTS),
    "cut",
    "slow",
    "disk",
    "clock",
)
"""kill -9, SIGTERM, SIGSTOP until SIGCONT, every connection cut, slow requests, a full disk, a wall
clock that jumps."""
INTERVALS = 20
"""In so many intervals each kind strikes once: 5 %."""
_ONCE = {f"{how} {part}" for how in ("kill", "term") for part in ("router", "trainer")}
"""These end a part that there is one of."""
_STOPPED = (1.0, 6.0)
_SLOW = 3.0
_FULL = (2.0, 5.0)
_JUMP = 7200.0
_PATIENCE = 300.0
_LIMITED = 64 << 10


def plan(intervals: int, rng: random.Random) -> list[str | None]:
    """The fault of each interval, None for a quiet one.

    The router and the trainer end in the first half only: in the second one, by which it is judged
    whether a service stays as it is, they live on, and so do the parts of rank 0.
    """
    out: list[str | None] = []
    while len(out) < intervals:
        these: list[str | None] = [*KINDS, *[None] * (INTERVALS - len(KINDS))]
        rng.shuffle(these)
        out += these
    half = len(out) // 2
    free = [k for k in range(half) if out[k] not in _ONCE]
    rng.shuffle(free)
    for k in range(half, len(out)):
        if out[k] in _ONCE and free:
            other = free.pop()
            out[k], out[other] = out[other], out[k]
    return out


class SmallDisk:
    """The file system of a folder, which a test can fill; or files that cannot grow.

    Without a small file system there, the service's own processes are kept from writing: a write
    then fails as it does on a disk that has a quota.
    """

    def __init__(self, folder: Path, *, small: bool) -> None:
        self._folder = folder
        self.small = small

    @contextlib.contextmanager
    def full(self, pids: list[int]) -> Iterator[None]:
        with self._filled() if self.small else _limited(pids):
            yield

    @contextlib.contextmanager
    def _filled(self) -> Iterator[None]:
        ballast = self._folder / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                for size in (1 << 22, 1 << 16, 1 << 12, 1):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(b"x" * size)
            yield
        finally:
            ballast.unlink()


@contextlib.contextmanager
def _limited(pids: list[int]) -> Iterator[None]:
    """No file of these processes grows beyond a size that it has long had."""
    unlimited = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)
    try:
        for pid in pids:
            psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (_LIMITED, psutil.RLIM_INFINITY))
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, unlimited)


def with_small_disks(arguments: list[str]) -> list[str]:
    """The command in a namespace where it may mount; itself where there is none."""
    own = [sys.executable, *arguments]
    for how in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        script = ["sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"]
        with contextlib.suppress(OSError):
            if subprocess.run([*how, *script], capture_output=True, check=False).returncode == 0:
                return [*how, *own]
    return own


class Faults:
    """Brings faults over a node's parts; somebody else has to call its `check`."""

    def __init__(
        self,
        node: Node,
        wire: Wire,
        disk: SmallDisk,
        clock: Path,
        rng: random.Random,
        *,
        killed: Callable[[str], None],
        after: Callable[[Kill], None],
    ) -> None:
        """``killed`` is called with a part's name when it was ended, ``after`` with each fault."""
        self._node = node
        self._wire = wire
        self._disk = disk
        self._clock = clock
        self._rng = rng
        self._killed = killed
        self._after = after
        self.done: list[Kill] = []
        self._turns: Counter[str] = Counter()

    async def run(self, faults: list[str | None], *, every: float) -> None:
        """One fault each ``every`` seconds, or when the one before is over."""
        began = time.monotonic()
        for number, kind in enumerate(faults):
            await asyncio.sleep(max(0.0, began + number * every - time.monotonic()))
            if kind is not None:
                fault = await self._bring(kind, late=number >= len(faults) // 2)
                self.done.append(fault)
                self._after(fault)
        await asyncio.sleep(max(0.0, began + len(faults) * every - time.monotonic()))

    async def _bring(self, kind: str, *, late: bool) -> Kill:
        at, began = time.time(), time.monotonic()
        how, _, part = kind.partition(" ")
        name = self._name(part, spared=late and how != "stop") if part else ""
        if how in ("kill", "term"):
            await self._end(name, signal.SIGKILL if how == "kill" else signal.SIGTERM)
        elif how == "stop":
            await self._stop(name)
        elif how == "cut":
            self._wire.cut()
        elif how == "slow":
            self._wire.slow = True
            await asyncio.sleep(_SLOW)
            self._wire.slow = False
        elif how == "disk":
            ranks = [part.pid for part in self._node.parts.values() if part.kind == "rank"]
            with self._disk.full(ranks):
                await asyncio.sleep(self._rng.uniform(*_FULL))
        else:
            set_clock(self._clock, self._rng.uniform(-_JUMP, _JUMP))
        return Kill(kind, name, at, time.monotonic() - began)

    def _name(self, part: str, *, spared: bool) -> str:
        """A part's name; ranks take turns, if rank 0 is not ``spared``."""
        if part in ("router", "trainer"):
            return part
        self._turns[part] += 1
        rank = 1 if spared else self._turns[part] % 2
        return f"rank-{rank}" if part == "proxy" else f"engine-{rank}"

    async def _end(self, name: str, number: signal.Signals) -> None:
        part = self._node.parts[name]
        await self._until(name, lambda: part.state == "ready")
        restarts, made = part.restarts, self._made()
        os.kill(part.pid, number)
        self._killed(name)
        await self._until(name, lambda: part.restarts > restarts and part.state == "ready")
        if name == "trainer":
            await self._until("the trainer's next step", lambda: self._made() != made)

    async def _stop(self, name: str) -> None:
        part = self._node.parts[name]
        pid = part.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._rng.uniform(*_STOPPED))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        await self._until(name, lambda: part.state == "ready")

    def _made(self) -> int:
        metrics = self._node.dir.metrics
        return metrics.stat().st_size if metrics.exists() else 0

    async def _until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} is not there {_PATIENCE:g} s after a fault")
            await asyncio.sleep(0.05)


def set_clock(path: Path, seconds: float) -> None:
    """How wrong the wall clock of processes is that see ``path`` (`clock/sitecustomize.py`)."""
    with open(path, "r+b") as file:
        file.write(struct.pack("d", seconds))
