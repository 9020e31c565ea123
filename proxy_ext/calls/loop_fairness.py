"""Work on the event loop that takes milliseconds: of many that come together, one at a time."""

from __future__ import annotations

import asyncio
from collections import deque


class LoopTurns:
    """Lets one go on in each round of the event loop, so that others' events go between.

    A hundred calls that arrive together would otherwise stop every stream until the prompts of
    all of them are rendered.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def next(self) -> None:
        """Return when this round is the caller's: in the order of asking."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        self._taken = True
        loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            # Not of one that was cancelled meanwhile.
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)
                return
        self._taken = False
