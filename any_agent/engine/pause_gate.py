"""Gates that calls wait at: while an engine's weights change, and while it is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from any_agent.errors import EngineUnavailable

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
"""Seconds between two questions whether the engine is back."""


class PauseGate:
    """Open, or closed for ``what``; waiting is bounded in number and time."""

    def __init__(self, what: str, *, max_wait: float, max_waiting: int = 4096) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._what = what
        self._max_wait = max_wait
        self._max_waiting = max_waiting
        self._waiting = 0
        self.closings = 0
        """How often it was closed: tells a call that this happened while it ran."""

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def close(self) -> None:
        if self._open.is_set():
            self.closings += 1
            self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        """Return once the gate is open; EngineUnavailable when that takes too long."""
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
                f"{self._what} took more than {self._max_wait:g} s; try again later",
                retry_after=5,
            ) from None
        finally:
            self._waiting -= 1


class Drain:
    """Counts the calls that must not be cut, so that what would cut them can wait."""

    def __init__(self, *, max_wait: float) -> None:
        self._max_wait = max_wait
        self._held = 0
        self._none = asyncio.Event()
        self._none.set()

    @asynccontextmanager
    async def held(self, counts: bool) -> AsyncIterator[None]:
        """A call runs in here; others than those that count pass."""
        if not counts:
            yield
            return
        self._held += 1
        self._none.clear()
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                self._none.set()

    async def drained(self) -> None:
        """Returns once none runs any more, or when that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._max_wait):
                await self._none.wait()


class Outage:
    """Closed while the engine is away. One task asks for it, however many calls wait.

    ``answers`` asks the engine once, in bounded time.
    """

    def __init__(self, answers: Callable[[], Awaitable[bool]], *, max_wait: float) -> None:
        self.gate = PauseGate("a restart of the inference engine", max_wait=max_wait)
        self._answers = answers
        self._asking: asyncio.Task[bool] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def is_over(self) -> bool:
        """Ask the engine now; calls that want to know at the same time share one question."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        # Shielded: who leaves must not take the answer from the others.
        return await asyncio.shield(self._asking)

    def begin(self) -> None:
        """A call saw the engine die: from here on calls wait, until it answers again."""
        self.gate.close()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._until_over())

    async def close(self) -> None:
        """End what still asks."""
        tasks = [task for task in (self._watch, self._asking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self) -> bool:
        return await self._answers()

    async def _until_over(self) -> None:
        pause = _FIRST_PAUSE
        await asyncio.sleep(pause)
        while not await self.is_over():
            pause = min(2 * pause, _LONGEST_PAUSE)
            await asyncio.sleep(pause)
        self.gate.open()
