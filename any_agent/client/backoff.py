"""Waits between attempts, with jitter, so that refused clients do not all return together."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from any_agent.errors import TooManyRequests

T = TypeVar("T")

RUN_WAIT = 6 * 3600.0
"""Seconds for which a request waits until its run is started, or gets its turn."""
_random = random.Random()
"""A separate generator, because a training process stores the global one in its checkpoints."""


def jittered(seconds: float, low: float = 0.5, high: float = 1.5) -> float:
    """Return ``seconds`` times a random factor."""
    return seconds * _random.uniform(low, high)


class Backoff:
    """The waits between the attempts of one request, for ``patience`` seconds.

    They begin with ``first`` seconds and double up to ``longest``.
    """

    def __init__(self, patience: float, *, first: float, longest: float) -> None:
        self._deadline = time.monotonic() + patience
        self._longest = longest
        self._extended = False
        self.delay = first
        """Seconds of the next wait, unless the service names another time."""

    def allows(self, seconds: float) -> bool:
        """Return True if a wait of so many seconds from now ends in time."""
        return time.monotonic() + seconds <= self._deadline

    def wait_for_run(self) -> None:
        """Be patient for `RUN_WAIT` seconds from the first call of this."""
        if not self._extended:
            self._extended = True
            self._deadline = max(self._deadline, time.monotonic() + RUN_WAIT)

    async def wait(self, at_least: float = 0.0) -> None:
        """Wait about ``delay`` seconds, or longer if the service names a later time; double it."""
        await asyncio.sleep(max(jittered(self.delay), jittered(at_least, 1.0, 1.2)))
        self.delay = min(2 * self.delay, self._longest)

    async def wait_at_least(self, seconds: float) -> None:
        """Wait for the time that the service names, or a little longer."""
        await asyncio.sleep(jittered(seconds, 1.0, 1.2))


async def wait_for_slot(
    attempt: Callable[[], Awaitable[T]],
    *,
    patience: float,
    refused: Callable[[TooManyRequests, float], Awaitable[object]] | None = None,
) -> T:
    """Repeat ``attempt`` while the service has no slot (429), for up to ``patience`` seconds.

    Before each repetition ``refused`` gets the refusal and the seconds since the first attempt.
    """
    began = time.monotonic()
    while True:
        try:
            return await attempt()
        except TooManyRequests as error:
            remaining = began + patience - time.monotonic()
            if remaining <= 0:
                raise
            pause = jittered(error.retry_after or 1.0, 0.8, 1.2)
            await asyncio.sleep(min(pause, remaining))
            if refused is not None:
                await refused(error, time.monotonic() - began)
