"""An event loop on a thread ends what is left on it when it is stopped; coroutines are timed."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress

import pytest

from any_agent.runtime import event_loop as loop_thread
from any_agent.runtime.event_loop import LoopThread, measure_steps


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("of a test")
    thread.start()
    yield thread
    if thread.started:
        thread.stop()


async def started(coroutine: object) -> None:
    """In a task that nobody waits for, and that is at its first wait then."""
    begun.add(asyncio.create_task(coroutine))  # type: ignore[arg-type]
    await asyncio.sleep(0)


begun: set[asyncio.Task[None]] = set()


def test_tasks_left_on_a_stopped_loop_are_ended_in_order(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []

    async def agent() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0)
            ended.append("agent")

    async def stream() -> AsyncGenerator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            ended.append("stream")

    left = stream()

    async def begin() -> None:
        await left.__anext__()
        await started(agent())

    thread.call(begin())
    with caplog.at_level(logging.WARNING):
        thread.stop()
        begun.clear()
        gc.collect()
    assert ended == ["agent", "stream"]
    assert not caplog.records
    assert thread.loop.is_closed()


def test_a_task_that_raises_system_exit_does_not_keep_the_loop_open(thread: LoopThread) -> None:
    async def ends() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            raise SystemExit(3)

    thread.call(started(ends()))
    thread.stop()
    assert thread.loop.is_closed()
    begun.clear()


def test_a_task_that_ignores_cancellation_is_logged_and_left(
    thread: LoopThread, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_thread, "CANCEL_TIMEOUT", 0.05)
    free = False

    async def stubborn() -> None:
        while not free:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue

    thread.call(started(stubborn()))
    with caplog.at_level(logging.WARNING):
        thread.stop()
    assert "1 cancelled tasks do not end" in caplog.text
    assert not thread.started
    free = True
    begun.clear()


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
