"""Keeps a trainer out that another one has taken over from.

Each start of the trainer has a number (`trainer.epoch` in the run's folder). The highest that a
rank has heard of is in its journal; whoever comes with a lower one can neither lease nor publish,
however long it was gone, also after the rank's restart. A request without a number is a person's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from any_agent.errors import StaleOwner
from proxy_ext.journal import Journal, PutMeta

_META = "trainer_epoch"


class Fence:
    """The highest start of the trainer that this rank has heard of."""

    def __init__(
        self, journal: Journal, taken_over: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """``taken_over`` is called once for each later start, before anything is done for it."""
        self._journal = journal
        self._taken_over = taken_over
        self._lock = asyncio.Lock()
        self.epoch = 0

    async def recover(self) -> None:
        """Load what the journal holds."""
        self.epoch = await self._journal.meta(_META) or 0

    async def enter(self, epoch: int | None) -> None:
        """A request of this start; StaleOwner if it is not the last one.

        A later one is durable before anything is done for it.
        """
        if epoch is not None and epoch > self.epoch:
            async with self._lock:
                if epoch > self.epoch:
                    if self._taken_over is not None:
                        await self._taken_over()
                    await self._journal.commit(PutMeta(_META, epoch))
                    self.epoch = epoch
        self.check(epoch)

    def check(self, epoch: int | None) -> None:
        """StaleOwner if another one took over since."""
        if epoch is not None and epoch < self.epoch:
            raise StaleOwner(
                f"start {self.epoch} of the trainer has taken over from start {epoch}, which must "
                "end; if that cannot be, write the higher number into the run's trainer.epoch"
            )
