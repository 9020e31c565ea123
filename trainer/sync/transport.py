"""How one bucket of weights comes to engines whose sessions are open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trainer.sync.base import Bucket
from trainer.sync.engine_client import EngineClient


class Transport(Protocol):
    """On the event loop of the ranks' clients."""

    async def open(self, engines: Sequence[EngineClient], *, cuda: bool) -> None:
        """Be ready to send to these; ``cuda``: the tensors are on a GPU."""

    async def send(self, engines: Sequence[EngineClient], bucket: Bucket, name: str) -> None:
        """One bucket to all of them at once; if one fails, all have failed.

        ``name`` is what an engine calls its weights from then on.
        """

    def drop(self) -> None:
        """Forget what was built: something failed."""
