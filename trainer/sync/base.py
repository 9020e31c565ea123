"""What every way of bringing new weights to the engines has in common."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from any_agent.rollout import RankClients
from trainer.sync.engine_client import EngineClient

T = TypeVar("T")
Bucket = list[tuple[str, Tensor]]

UNREACHABLE_TIMEOUT = 60.0
"""Seconds, on top of those that loading may take, that a rank which restarts is waited for."""
RELOAD_SLACK = 60.0
"""Seconds after which an engine goes on whose update nobody ends, on top of twice its time."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """The policy's weights as one version."""

    version: int
    step: int
    folder: Path
    """`weights/v...` of the run."""
    write: Callable[[], object]
    """Writes the folder, unless it is there. Like `buckets` it belongs to the trainer's thread."""
    buckets: Callable[[], Iterator[Bucket]]
    """All of them, whole tensors under a checkpoint's names, in the engines' precision."""

    @property
    def loading(self) -> str:
        """What an engine calls itself until it is known to have all of them: no version."""
        return f"loading-{self.version}"


class WeightSync(Protocol):
    """Makes ranks sample with new weights. Called in the trainer's thread; every call ends.

    Where a rank is away, proxy or engine, it is tried again until it is back. Raises
    EngineUnavailable if one did not take them in time, TrainingError if one refused them, both once
    the others have them. Such a rank goes on with what it has, if that is whole: its engine stamps
    that on every token, so nothing is recorded under a wrong version.
    """

    def prepare(self, new: NewWeights) -> None:
        """What can be done before anybody is paused."""

    def update(self, ranks: RankClients, new: NewWeights) -> None:
        """Every rank."""

    def repair(self, ranks: RankClients, new: NewWeights) -> None:
        """The ranks that sample with something else: an engine was restarted."""

    def close(self) -> None:
        """Leave what the engines share with this process."""


class EngineCall(Protocol):
    """Runs a coroutine on the event loop of the ranks' clients and waits for it."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T: ...


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
