from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from any_agent.runtime.event_loop import measure_steps
from any_agent.runtime.metrics import Histogram, loop_lag_histogram, watch_loop_lag


class Watched(Histogram):
    """Says when something is observed."""

    def __init__(self) -> None:
        super().__init__(loop_lag_histogram().bounds)
        self.worst = 0.0
        self.seen = asyncio.Event()

    def observe(self, value: float) -> None:
        super().observe(value)
        self.worst = max(self.worst, value)
        self.seen.set()


async def test_a_loop_that_is_blocked_is_late() -> None:
    lag = Watched()
    async with watch_loop_lag(lag, every=0.001):
        await asyncio.wait_for(lag.seen.wait(), 60)
        lag.seen.clear()
        # What the watch is there to find.
        time.sleep(0.3)  # noqa: ASYNC251
        await asyncio.wait_for(lag.seen.wait(), 60)
    assert lag.worst >= 0.29
    assert sum(lag.counts[lag.bounds.index(0.25) + 1 :]) >= 1


async def test_the_watch_ends_with_its_context() -> None:
    async with watch_loop_lag(loop_lag_histogram(), every=0.001):
        assert len(asyncio.all_tasks()) == 2
    assert len(asyncio.all_tasks()) == 1


async def test_the_time_of_each_step_of_a_coroutine_is_reported() -> None:
    held: list[float] = []
    free = asyncio.Event()

    async def run() -> str:
        # What is told.
        time.sleep(0.3)  # noqa: ASYNC251
        await free.wait()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "done"

    task = asyncio.ensure_future(measure_steps(run(), held.append))
    await asyncio.sleep(0)
    assert len(held) == 1 and held[0] >= 0.29
    free.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(held) == 2
    task.cancel()
    assert await task == "done" and len(held) == 3


async def test_what_is_raised_and_a_cancellation_pass_through() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await measure_steps(fails(), lambda _: None)
    task = asyncio.ensure_future(measure_steps(asyncio.Event().wait(), lambda _: None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
