"""The SDK's own thread: it runs blocking sessions, and beats for all sessions.

So a tool that blocks its caller's event loop for an hour does not let a session expire.
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

_CLEANS_UP_TIMEOUT = 6.0
"""Seconds for a coroutine that was cancelled."""

_lock = threading.Lock()
_thread: LoopThread | None = None


def sdk_thread() -> LoopThread:
    """One for the process, started when it is first needed."""
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
        # No other thread runs any more: it would be waited for in vain.
        coroutine.close()
        raise RuntimeError(f"{what} comes too late: the interpreter is shutting down")
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        coroutine.close()
        raise RuntimeError(
            f"{what} would block the event loop that runs here: use `async with AgentSession(...)` "
            "and await its methods, or do this in a thread (asyncio.to_thread)"
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
            ended.wait(_CLEANS_UP_TIMEOUT)
        raise


def _in_child() -> None:
    """A forked process has none of its parent's threads."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_in_child)
