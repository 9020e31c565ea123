"""The SDK's thread, which runs blocking sessions and sends all heartbeats.

A tool that blocks its caller's event loop for an hour therefore lets no session expire.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from any_agent.runtime.event_loop import LoopThread

T = TypeVar("T")

_CANCEL_TIMEOUT = 6.0
"""Seconds that a cancelled coroutine has for cleaning up."""

_lock = threading.Lock()
_thread: LoopThread | None = None


def sdk_thread() -> LoopThread:
    """Return the process's thread, which starts when it is first needed."""
    global _thread
    with _lock:
        if _thread is None:
            thread = LoopThread("any-agent SDK")
            thread.start()
            _thread = thread
        return _thread


def wait_for(
    coroutine: Coroutine[Any, Any, T],
    loop: asyncio.AbstractEventLoop,
    *,
    what: str,
    within: float = 600.0,
) -> T:
    """Run a coroutine on an event loop of another thread, and wait for it.

    Ctrl-C cancels it, and waits until it has cleaned up. RuntimeError where this would block the
    event loop of the caller's thread, and when the process ends; TimeoutError after ``within``
    seconds.
    """
    if sys.is_finalizing():
        # No other thread runs any more: the wait would never end.
        coroutine.close()
        raise RuntimeError(f"{what} cannot be called any more: the interpreter is shutting down")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        coroutine.close()
        raise RuntimeError(
            f"{what} would block the running event loop: use `async with AgentSession(...)` and "
            "await its methods, or call this in a thread (asyncio.to_thread)"
        )
    ended = threading.Event()

    async def run() -> T:
        try:
            return await coroutine
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(run(), loop)
    try:
        return future.result(within)
    except BaseException:
        if future.cancel():
            ended.wait(_CANCEL_TIMEOUT)
        raise


def _reset() -> None:
    """Forget the thread, which a forked process does not have."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_reset)
