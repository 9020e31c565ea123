"""An event loop on a thread: what is left on it when it is stopped is ended, not destroyed."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Iterator

import pytest

from any_agent.runtime import event_loop as loop_thread
from any_agent.runtime.event_loop import LoopThread


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
