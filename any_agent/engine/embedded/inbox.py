"""Functions that other threads post to the generation loop, which runs them between two steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from any_agent.errors import EngineUnavailable

T = TypeVar("T")


class Inbox:
    """The posted functions of one loop, in their order."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[tuple[Callable[[], None], Callable[[Exception], None]]]
        self._posted = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.closed = False
        """Posting is refused."""

    def post(self, run: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        """Let the loop call ``run``, or ``fail`` if it ends before; EngineUnavailable if it has."""
        with self._lock:
            if self.closed:
                raise EngineUnavailable("the generation loop has ended")
            self._posted.put((run, fail))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Let the loop call a function; the future has its result. Raises as :meth:`post`."""
        future: Future[T] = Future()

        self.post(lambda: fulfil(future, function), lambda error: fail(future, error))
        return future

    def take(self, *, wait: bool) -> Callable[[], None] | None:
        """Return the next function; None if there is none, unless it must ``wait`` for one."""
        try:
            return self._posted.get(block=wait)[0]
        except queue.Empty:
            return None

    def close(self, error: Exception) -> None:
        """Refuse further functions, and fail those that were not run."""
        with self._lock:
            self.closed = True
        while not self._posted.empty():
            self._posted.get_nowait()[1](error)


def fulfil(future: Future[T], function: Callable[[], T]) -> None:
    """Set the future to the function's result, unless its owner has cancelled it."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except Exception as exc:
            future.set_exception(exc)


def fail(future: Future[Any], error: Exception) -> None:
    """Set the future to an error, unless its owner has cancelled it."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
