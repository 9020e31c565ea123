"""How late an event loop runs what is due: the time for which it was busy with something else."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from any_agent.runtime.metrics import Histogram, Metric

LOOP_LAG = Metric(
    "any_agent_loop_lag_seconds",
    "histogram",
    "Seconds by which the part's event loop was late, looked at ten times a second: whatever it "
    "does for so long holds up every stream.",
    ("part",),
)
T = TypeVar("T")

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_INTERVAL = 0.1
"""Seconds. Whoever blocks the loop for longer is seen for certain, others as often as they do."""


def loop_lag_histogram() -> Histogram:
    """Of no observation yet."""
    return Histogram(_BOUNDS)


@asynccontextmanager
async def watched_loop(lag: Histogram, *, every: float = _INTERVAL) -> AsyncIterator[None]:
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


async def told_of_steps(run: Awaitable[T], tell: Callable[[float], object]) -> T:
    """Await it, and tell for how many seconds each of its steps held the event loop.

    Steps of tasks that it starts are not among them.
    """
    return await _steps(run, tell)


@types.coroutine
def _steps(run: Awaitable[T], tell: Callable[[float], object]) -> Generator[Any, Any, T]:
    steps = _awaited(run)
    step: Callable[[], Any] = partial(steps.send, None)
    while True:
        began = time.monotonic()
        try:
            waits_for = step()
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        finally:
            tell(time.monotonic() - began)
        try:
            step = partial(steps.send, (yield waits_for))
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:
            step = partial(steps.throw, error)


async def _awaited(run: Awaitable[T]) -> T:
    return await run
