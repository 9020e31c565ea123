"""Gates at which calls wait while an engine's weights change, or while it is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from any_agent.errors import EngineUnavailable

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
"""Seconds between two health checks of an engine that is away."""


class PauseGate:
    """A gate, open or closed because of ``what``; waiting is bounded in number and time."""

    def __init__(self, what: str, *, max_wait: float, max_waiting: int = 4096) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._what = what
        self._max_wait = max_wait
        self._max_waiting = max_waiting
        self._waiting = 0
        self.closings = 0
        """The number of closings, by which a call detects one while it ran."""

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def close(self) -> None:
        if self._open.is_set():
            self.closings += 1
            self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def wait_open(self) -> None:
        """Return once the gate is open; EngineUnavailable if that takes too long."""
        if self._open.is_set():
            return
        if self._waiting >= self._max_waiting:
            raise EngineUnavailable(f"too many calls wait for {self._what}", retry_after=2)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._max_wait):
                await self._open.wait()
        except TimeoutError:
            raise EngineUnavailable(
                f"{self._what} took more than {self._max_wait:g} s; try again later", retry_after=5
            ) from None
        finally:
            self._waiting -= 1


class Drain:
    """Counts the calls that must not be cut, so that a weight update can wait for them."""

    def __init__(self, *, max_wait: float) -> None:
        self._max_wait = max_wait
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def track(self, counts: bool) -> AsyncIterator[None]:
        """Count the call that runs in the block, if it ``counts``."""
        if not counts:
            yield
            return
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Return once no counted call runs, or when that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._max_wait):
                await self._idle.wait()


class Outage:
    """A gate that is closed while the engine is away; one task polls the engine for all calls.

    ``check`` asks the engine once, in bounded time.
    """

    def __init__(self, check: Callable[[], Coroutine[Any, Any, bool]], *, max_wait: float) -> None:
        self.gate = PauseGate("a restart of the inference engine", max_wait=max_wait)
        self._check = check
        self._checking: asyncio.Task[bool] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def is_over(self) -> bool:
        """Check the engine now; simultaneous callers share one check."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())
        # Shielded: a caller that is cancelled must not cancel the others' check.
        return await asyncio.shield(self._checking)

    def begin(self) -> None:
        """Close the gate, after a call saw the engine die, until the engine answers again."""
        self.gate.close()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._poll())

    def end(self) -> None:
        """Open the gate at once: the engine was never away."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self.gate.open()

    async def close(self) -> None:
        """Cancel the polling."""
        tasks = [task for task in (self._watch, self._checking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self) -> None:
        pause = _FIRST_PAUSE
        await asyncio.sleep(pause)
        while not await self.is_over():
            pause = min(2 * pause, _LONGEST_PAUSE)
            await asyncio.sleep(pause)
        self.gate.open()
