"""Event loops: one on a thread of its own, the duration of a coroutine's steps, cancellation."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

CANCEL_TIMEOUT = 5.0  # seconds that cancelled tasks have to end
_JOIN_TIMEOUT = 2 * CANCEL_TIMEOUT


class LoopThread:
    """An event loop on a thread of its own, for callers on other threads."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def started(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float = 120.0) -> T:
        """Run a coroutine on the loop and wait for it; TimeoutError after ``timeout`` seconds."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("called from its own event loop, which it would block for ever")
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                raise
            raise TimeoutError(
                f"the event loop of the {self._thread.name} did not answer within {timeout:g} s: "
                "code that runs there must not block it; use await, or asyncio.to_thread"
            ) from None
        finally:
            # The caller has stopped waiting; a future that is done stays as it is.
            future.cancel()

    def soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Schedule a function on the loop's thread and return at once."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """End the loop: cancel its tasks and give them 5 s to end.

        A thread that does not end in time is left running until the process ends.
        """
        self._stopping = True
        self.soon(self.loop.stop)
        self._thread.join(_JOIN_TIMEOUT)
        if not self._thread.is_alive():
            self.loop.close()

    def _run(self) -> None:
        while not self._stopping:
            self._run_until_stopped()
        # Tasks that are destroyed with their loop would be reported as pending.
        end = self.loop.create_task(self._cancel_all())
        end.add_done_callback(lambda _: self.loop.stop())
        while not end.done():
            self._run_until_stopped()

    def _run_until_stopped(self) -> None:
        try:
            self.loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            # Raised by one task, which has it as its result; the others go on.
            log.warning("a task on the thread %s tried to end it: %r", self._thread.name, error)

    async def _cancel_all(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            _, late = await asyncio.wait(left, timeout=CANCEL_TIMEOUT)
            if late:
                log.warning("%d cancelled tasks do not end: %r", len(late), late)
        await self.loop.shutdown_asyncgens()


async def cancel_and_wait(run: asyncio.Future[Any], name: str) -> None:
    """Cancel a run of the agent ``name`` and wait 5 s for its end; leave it alone after that."""
    if not run.done():
        run.cancel()
        await asyncio.wait([run], timeout=CANCEL_TIMEOUT)
    if run.done():
        # Retrieve the exception so that asyncio does not log it.
        _ = run.cancelled() or run.exception()
    else:
        log.warning("a run of %s did not end after it was cancelled; it is left running", name)


async def measure_steps(run: Awaitable[T], record: Callable[[float], object]) -> T:
    """Await ``run`` and record how many seconds each of its steps blocked the event loop.

    Steps of tasks that it starts are not among them.
    """
    return await _steps(run, record)


@types.coroutine
def _steps(run: Awaitable[T], record: Callable[[float], object]) -> Generator[Any, Any, T]:
    steps = _await(run)
    step: Callable[[], Any] = partial(steps.send, None)
    while True:
        began = time.monotonic()
        try:
            waits_for = step()
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        finally:
            record(time.monotonic() - began)
        try:
            step = partial(steps.send, (yield waits_for))
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:
            step = partial(steps.throw, error)


async def _await(run: Awaitable[T]) -> T:
    return await run
