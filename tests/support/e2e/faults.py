"""The faults of a soak: each kind in one interval of twenty, one after another, from one seed."""

from __future__ import annotations

import asyncio
import random
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from any_agent.launcher import Node
from tests.support.e2e.killing import Kill, end_part, stopped
from tests.support.e2e.wire import Wire
from tests.support.small_disk import Disk
from tests.support.waiting import until

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


class Faults:
    """Brings faults over a node's parts; somebody else has to call its `check`."""

    def __init__(
        self,
        node: Node,
        wire: Wire,
        disk: Disk,
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
            number = signal.SIGKILL if how == "kill" else signal.SIGTERM
            await self._ready(name)
            await end_part(self._node, name, number, self._killed)
        elif how == "stop":
            await self._stop(name)
        elif how == "cut":
            self._wire.cut()
        elif how == "slow":
            self._wire.slow = True
            await asyncio.sleep(_SLOW)
            self._wire.slow = False
        elif how == "disk":
            self._disk.fill()
            try:
                await asyncio.sleep(self._rng.uniform(*_FULL))
            finally:
                self._disk.make_room()
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

    async def _stop(self, name: str) -> None:
        with stopped(self._node.parts[name].pid):
            await asyncio.sleep(self._rng.uniform(*_STOPPED))
        await self._ready(name)

    async def _ready(self, name: str) -> None:
        part = self._node.parts[name]
        await until(lambda: part.state == "ready", name, within=_PATIENCE)


def set_clock(path: Path, seconds: float) -> None:
    """How wrong the wall clock of processes is that see ``path`` (`clock/sitecustomize.py`)."""
    with open(path, "r+b") as file:
        file.write(struct.pack("d", seconds))
