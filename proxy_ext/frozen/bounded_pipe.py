"""What a call hands to its client, a bounded number of pieces ahead of it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedPipe(Generic[T]):
    """From one task to another."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: deque[T] = deque()
        self._came = asyncio.Event()
        self._room = asyncio.Event()

    async def put(self, item: T) -> None:
        """Waits while as many as may be are there already."""
        while len(self._items) >= self._most:
            self._room.clear()
            await self._room.wait()
        self.end(item)

    def end(self, item: T) -> None:
        """The last one: it waits for nobody."""
        self._items.append(item)
        self._came.set()

    async def get(self) -> T:
        while not self._items:
            self._came.clear()
            await self._came.wait()
        self._room.set()
        return self._items.popleft()
