"""Keeps open sessions from expiring while their agents are busy elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from dataclasses import dataclass

from any_agent.errors import AnyAgentError, NotFound, SessionClosed, Unauthenticated
from any_agent.protocol.rl import SessionStarted
from any_agent.sdk.find_service import ServiceAddress, borrow_client, return_client
from any_agent.sdk.sdk_thread import sdk_thread

log = logging.getLogger(__name__)

_UNKNOWN = 180.0
"""Seconds that a session may be idle, of a service that does not say."""
_SHARE = 3.0
_SHORTEST = 0.2
_AT_ONCE = 32
"""Beats under way together."""
_RETRY_FOR = 10.0
_ANSWERED_TIMEOUT = 20.0
"""Seconds: a service that hangs does not keep the beats of others waiting."""


@dataclass(slots=True)
class _Beating:
    service: ServiceAddress
    session: SessionStarted
    every: float
    due: float


class Heartbeats:
    """All sessions' of the process, by one task on the SDK's thread.

    A session that ends before its first beat is due costs no request, and wakes nobody.
    """

    def __init__(self) -> None:
        self._beating: dict[int, _Beating] = {}
        """By the identity of what opening it answered: services may give the same ids, and one
        session may be opened twice under its idempotency key."""
        self._lock = threading.Lock()
        self._task: asyncio.Task[None] | None = None
        self._wakes_at = float("inf")

    def add(self, service: ServiceAddress, session: SessionStarted) -> None:
        """Beat from now on, a third of the way before it would expire."""
        every = max(_SHORTEST, (session.idle_in or _UNKNOWN) / _SHARE)
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
            # Not cancelled when a session wakes this task that is to beat earlier.
            await asyncio.shield(self._beat_all(due))

    async def _beat_all(self, due: list[_Beating]) -> None:
        for first in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*map(self._beat, due[first : first + _AT_ONCE]))

    async def _beat(self, one: _Beating) -> None:
        client = borrow_client(one.service, retry_for=_RETRY_FOR)
        try:
            async with asyncio.timeout(_ANSWERED_TIMEOUT):
                await client.heartbeat(one.session)
        except (SessionClosed, NotFound, Unauthenticated) as error:
            # What this means for its agent its next request says.
            log.debug("session %s: %s", one.session.session_id, error.message)
            self.remove(one.session)
        except (AnyAgentError, TimeoutError) as error:
            log.debug("heartbeat of %s: %s", one.session.session_id, error)
        finally:
            await return_client(one.service, retry_for=_RETRY_FOR)


_of_process = Heartbeats()


def heartbeats() -> Heartbeats:
    """The process's."""
    return _of_process


def _in_child() -> None:
    """Sessions that were open when a process forked are its parent's to keep alive."""
    global _of_process
    _of_process = Heartbeats()


os.register_at_fork(after_in_child=_in_child)
