"""`Heartbeats` keep open sessions from expiring while their agents are busy elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from dataclasses import dataclass

from any_agent.errors import AnyAgentError, NotFound, SessionClosed, Unauthenticated
from any_agent.protocol.rl import SessionStarted
from any_agent.sdk.find_service import ServiceAddress, shared_client
from any_agent.sdk.sdk_thread import sdk_thread

log = logging.getLogger(__name__)

_DEFAULT_IDLE_TIMEOUT = 180.0
"""Seconds that a session may be idle, if its service does not report them."""
_BEATS_PER_TIMEOUT = 3.0
_MIN_INTERVAL = 0.2
_MAX_CONCURRENT = 32
_RETRY_FOR = 10.0
_BEAT_TIMEOUT = 20.0
"""Seconds for which a service that hangs may delay the heartbeats of others."""


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


heartbeats = Heartbeats()
"""The heartbeats of this process."""
os.register_at_fork(after_in_child=heartbeats.reset)
