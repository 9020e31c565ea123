"""kill -9 for the parts of a running service, one after another, at random moments."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from any_agent.launcher import Node
from tests.support.waiting import until

KINDS = ("proxy", "engine", "router", "trainer")
_IN_A_ROW = 3
"""Fewer kills of one kind than end a service by its restart policy."""
_LONGEST_PAUSE = 4.0
_PATIENCE = 400.0


@dataclass(slots=True)
class Kill:
    """One kill. ``at`` is in seconds since the epoch."""

    kind: str
    part: str
    at: float
    seconds: float
    """Until the part was ready again."""


def schedule(kills: int, ranks: int, rng: random.Random) -> list[tuple[str, str]]:
    """(kind, part's name), each kind ``kills`` times, in a random order; ranks take turns."""
    kinds = [kind for kind in KINDS for _ in range(kills)]
    rng.shuffle(kinds)
    while _longest_run(kinds) > _IN_A_ROW:
        rng.shuffle(kinds)
    first = rng.randrange(ranks)
    count = dict.fromkeys(KINDS, first)
    out = []
    for kind in kinds:
        rank = count[kind] % ranks
        count[kind] += 1
        out.append((kind, {"proxy": f"rank-{rank}", "engine": f"engine-{rank}"}.get(kind, kind)))
    return out


def _longest_run(kinds: list[str]) -> int:
    longest = run = 0
    before = ""
    for kind in kinds:
        run = run + 1 if kind == before else 1
        before = kind
        longest = max(longest, run)
    return longest


class Killer:
    """Kills one part at a time, when the one before is ready again and a random time has passed.

    Somebody else has to call the node's `check`, which starts dead parts again.
    """

    def __init__(
        self,
        node: Node,
        plan: list[tuple[str, str]],
        rng: random.Random,
        *,
        after: Callable[[Kill], None] = lambda _: None,
        killed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``killed`` is called with the part's name at once, ``after`` when it is ready again."""
        self._node = node
        self._plan = plan
        self._rng = rng
        self._after = after
        self._killed = killed
        self.kills: list[Kill] = []

    async def run(self) -> None:
        for kind, name in self._plan:
            await asyncio.sleep(self._rng.uniform(0, _LONGEST_PAUSE))
            kill = await self._kill(kind, name)
            self.kills.append(kill)
            self._after(kill)

    async def _kill(self, kind: str, name: str) -> Kill:
        at, began = time.time(), time.monotonic()
        await end_part(self._node, name, signal.SIGKILL, self._killed)
        return Kill(kind, name, at, time.monotonic() - began)


async def end_part(
    node: Node, name: str, number: signal.Signals, killed: Callable[[str], None]
) -> None:
    """Send a part the signal; return when it is ready again, the trainer when it made a step."""
    part, metrics = node.parts[name], node.dir.metrics
    restarts, size = part.restarts, _size(metrics)

    def back() -> bool:
        ready = part.restarts > restarts and part.state == "ready"
        return ready and (name != "trainer" or _size(metrics) > size)

    os.kill(part.pid, number)
    killed(name)
    await until(back, f"{name}, which got {number.name},", within=_PATIENCE)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end of the block, if the process is still there."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def seconds_of(kills: list[Kill], kind: str) -> tuple[int, float, float]:
    """How many of a kind, and the median and the worst time until the part was ready again."""
    times = [kill.seconds for kill in kills if kill.kind == kind]
    return len(times), statistics.median(times or [0.0]), max(times, default=0.0)
