"""The SDK's thread, which runs blocking sessions and sends all heartbeats.

A tool that blocks its caller's event loop for an hour therefore lets no session expire.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from any_agent.errors import AnyAgentError, NotFound, SessionClosed, Unauthenticated
from any_agent.protocol.rl import SessionStarted
from any_agent.runtime.event_loop import LoopThread
from any_agent.sdk.find_service import ServiceAddress, shared_client

log = logging.getLogger(__name__)
T = TypeVar("T")

_CANCEL_TIMEOUT = 6.0  # seconds that a cancelled coroutine has for cleaning up

_DEFAULT_IDLE_TIMEOUT = 180.0
"""Seconds that a session may be idle, if its service does not report them."""
_BEATS_PER_TIMEOUT = 3.0
_MIN_INTERVAL = 0.2
_MAX_CONCURRENT = 32
_RETRY_FOR = 10.0
_BEAT_TIMEOUT = 20.0  # seconds for which a service that hangs may delay the heartbeats of others

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


@dataclass(slots=True)
class _Beating:
    service: ServiceAddress
    session: SessionStarted
    every: float
    due: float


class Heartbeats:
    """Heartbeats of all sessions of the process, sent by one task on the SDK's thread.

    A session that ends before its first beat is due costs no request, and does not wake it.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start anew in a forked process, whose parent keeps the open sessions alive."""
        self._beating: dict[int, _Beating] = {}
        """The sessions by the identity of the reply that opened them: services may give the same
        ids, and one session may be opened twice under its idempotency key."""
        self._lock = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._wakes_at = float("inf")

    def add(self, service: ServiceAddress, session: SessionStarted) -> None:
        """Send heartbeats from now on, three in the time after which the session would expire."""
        every = max(_MIN_INTERVAL, (session.idle_in or _DEFAULT_IDLE_TIMEOUT) / _BEATS_PER_TIMEOUT)
        due = time.monotonic() + every
        with self._lock:
            self._beating[id(session)] = _Beating(service, session, every, due)
            if due >= self._wakes_at:
                return
            self._wakes_at = due
        sdk_thread().soon(self._wake)

    def remove(self, session: SessionStarted) -> None:
        with self._lock:
            self._beating.pop(id(session), None)

    # -- on the SDK's thread -------------------------------------------------------------------

    def _wake(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            with self._lock:
                if not self._beating:
                    self._wakes_at = float("inf")
                    return
                self._wakes_at = min(one.due for one in self._beating.values())
            await asyncio.sleep(max(0.0, self._wakes_at - time.monotonic()))
            now = time.monotonic()
            with self._lock:
                due = [one for one in self._beating.values() if one.due <= now]
            for one in due:
                one.due = now + one.every
            # Not cancelled when a session whose beat is due earlier restarts this task.
            await asyncio.shield(self._beat_all(due))

    async def _beat_all(self, due: list[_Beating]) -> None:
        for first in range(0, len(due), _MAX_CONCURRENT):
            await asyncio.gather(*map(self._beat, due[first : first + _MAX_CONCURRENT]))

    async def _beat(self, one: _Beating) -> None:
        try:
            async with (
                shared_client(one.service, retry_for=_RETRY_FOR) as client,
                asyncio.timeout(_BEAT_TIMEOUT),
            ):
                await client.heartbeat(one.session)
        except (SessionClosed, NotFound, Unauthenticated) as error:
            # The agent's next request will show this error.
            log.debug("session %s needs no heartbeat: %s", one.session.session_id, error.message)
            self.remove(one.session)
        except (AnyAgentError, TimeoutError) as error:
            log.debug("cannot send the heartbeat of %s: %s", one.session.session_id, error)


def _reset() -> None:
    """Forget the thread, which a forked process does not have."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_reset)
heartbeats = Heartbeats()
"""The heartbeats of this process."""
os.register_at_fork(after_in_child=heartbeats.reset)
