"""Waiting for what must happen in a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

LIMIT = 60.0
"""Seconds until a test gives up on what must happen in a moment."""


async def until(
    condition: Callable[[], Any], what: str = "the condition", within: float = LIMIT
) -> Any:
    """Poll until it is truthy; its value."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not come true within {within:g} s"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def meanwhile(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these until the end of the block, which cancels them."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
