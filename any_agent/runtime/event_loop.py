"""An event loop on a thread of its own, for whoever calls from another one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

_ENDS_TIMEOUT = 5.0
_JOINS_TIMEOUT = 2 * _ENDS_TIMEOUT
"""Seconds."""


class LoopThread:
    """Start it, give it coroutines, stop it."""

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
                "what runs there must not block it; use await, or asyncio.to_thread"
            ) from None
        finally:
            # Nobody waits for it any more; what has ended is not changed by this.
            future.cancel()

    def soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop's thread; returns at once."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """End the loop: what still runs on it is cancelled, and has 5 s to end in.

        A thread that does not end in time is left to the end of the process.
        """
        self._stopping = True
        self.soon(self.loop.stop)
        self._thread.join(_JOINS_TIMEOUT)
        if not self._thread.is_alive():
            self.loop.close()

    def _run(self) -> None:
        while not self._stopping:
            self._until_stopped()
        # What others have left: destroyed with the loop it would be told of as pending tasks.
        end = self.loop.create_task(self._end_all())
        end.add_done_callback(lambda _: self.loop.stop())
        while not end.done():
            self._until_stopped()

    def _until_stopped(self) -> None:
        try:
            self.loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            # Of some task, which has it as its result; the others go on.
            log.warning("a task on the thread %s tried to end it: %r", self._thread.name, error)

    async def _end_all(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            _, late = await asyncio.wait(left, timeout=_ENDS_TIMEOUT)
            if late:
                log.warning("%d tasks do not end although they are cancelled: %r", len(late), late)
        await self.loop.shutdown_asyncgens()
