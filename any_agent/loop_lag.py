"""How late an event loop runs what is due: the time for which it was busy with something else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from any_agent.metrics import Histogram, Metric

LOOP_LAG = Metric(
    "any_agent_loop_lag_seconds",
    "histogram",
    "Seconds by which the part's event loop was late, looked at ten times a second: whatever it "
    "does for so long holds up every stream.",
    ("part",),
)
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_EVERY = 0.1
"""Seconds. Whoever blocks the loop for longer is seen for certain, others as often as they do."""


def new_lag() -> Histogram:
    """Of no observation yet."""
    return Histogram(_BOUNDS)


@asynccontextmanager
async def watched_loop(lag: Histogram, *, every: float = _EVERY) -> AsyncIterator[None]:
    """Observe the running loop's lag, in seconds, until the context ends."""
    watch = asyncio.create_task(_watch(lag, every))
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait([watch])


async def _watch(lag: Histogram, every: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + every
        await asyncio.sleep(every)
        lag.observe(max(0.0, loop.time() - due))
