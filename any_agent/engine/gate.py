"""The gate that calls wait at while an engine's weights change."""

from __future__ import annotations

import asyncio

from any_agent.errors import EngineUnavailable


class UpdateGate:
    """Open, or closed for an update; waiting is bounded in number and time."""

    def __init__(self, *, max_wait: float, max_waiting: int = 4096) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._max_wait = max_wait
        self._max_waiting = max_waiting
        self._waiting = 0
        self.closings = 0
        """How often it was closed: tells a call that an update came while it ran."""

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
            raise EngineUnavailable("too many calls wait for a weight update", retry_after=2)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._max_wait):
                await self._open.wait()
        except TimeoutError:
            raise EngineUnavailable(
                f"a weight update took more than {self._max_wait:g} s; try again later",
                retry_after=5,
            ) from None
        finally:
            self._waiting -= 1
