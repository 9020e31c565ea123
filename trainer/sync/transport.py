"""How one bucket of weights comes to engines whose sessions are open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trainer.sync.base import Bucket
from trainer.sync.engine import Engine


class Transport(Protocol):
    """On the event loop of the ranks' clients."""

    async def open(self, engines: Sequence[Engine], *, cuda: bool) -> None:
        """Be ready to send to these; ``cuda``: the tensors are on a GPU."""

    async def send(self, engines: Sequence[Engine], bucket: Bucket, version: int) -> None:
        """One bucket to all of them at once; if one fails, all have failed."""

    def drop(self) -> None:
        """Forget what was built: something failed."""


def named(engine: Engine, version: int) -> dict[str, Any]:
    """What a bucket says of the version.

    SGLang would call itself so from its first bucket on, when the others are still the old ones.
    """
    return {"weight_version": str(version)} if engine.about.embedded else {}
