from __future__ import annotations

import asyncio
import time

from any_agent.loop_lag import new_lag, watched_loop
from any_agent.metrics import Histogram


class Watched(Histogram):
    """Says when something is observed."""

    def __init__(self) -> None:
        super().__init__(new_lag().bounds)
        self.worst = 0.0
        self.seen = asyncio.Event()

    def observe(self, value: float) -> None:
        super().observe(value)
        self.worst = max(self.worst, value)
        self.seen.set()


async def test_a_loop_that_is_blocked_is_late() -> None:
    lag = Watched()
    async with watched_loop(lag, every=0.001):
        await asyncio.wait_for(lag.seen.wait(), 60)
        lag.seen.clear()
        # What the watch is there to find.
        time.sleep(0.3)  # noqa: ASYNC251
        await asyncio.wait_for(lag.seen.wait(), 60)
    assert lag.worst >= 0.29
    assert sum(lag.counts[lag.bounds.index(0.25) + 1 :]) >= 1


async def test_the_watch_ends_with_its_context() -> None:
    async with watched_loop(new_lag(), every=0.001):
        assert len(asyncio.all_tasks()) == 2
    assert len(asyncio.all_tasks()) == 1
