"""The base class of weight syncs, with the retry policy that they share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from any_agent.errors import EngineUnavailable, ServiceUnavailable
from any_agent.protocol.training import RunInfo
from any_agent.rollout import RankClients
from trainer.weight_buckets import Bucket

log = logging.getLogger(__name__)
T = TypeVar("T")

UNREACHABLE_TIMEOUT = 60.0
"""Seconds that an update waits for a rank that restarts, on top of the loading time."""
RETRY_DELAY = 1.0  # seconds between two tries
_RELOAD_SLACK = 60.0
"""Seconds, on top of twice the loading time, after which a paused engine resumes by itself."""
_CALL_SLACK = 20 * UNREACHABLE_TIMEOUT
"""Seconds, on top of twice the loading time, that one call may take: it waits for proxies, too."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """The policy's weights as one version."""

    version: int
    step: int
    folder: Path
    """The run's folder `weights/v...`."""
    write: Callable[[], object]
    """Writes the folder unless it exists. Call it, like `buckets`, in the trainer's thread."""
    buckets: Callable[[], Iterator[Bucket]]
    """Yields all weights as whole tensors under a checkpoint's names, in the engines' precision."""

    @property
    def loading(self) -> str:
        """The name of an engine's weights until it verifiably has all of them; not a version."""
        return f"loading-{self.version}"


class EngineCall(Protocol):
    """Runs a coroutine on the event loop of the ranks' clients and waits for it."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T: ...


class UpdateDeadline:
    """The time in which ranks must take a version."""

    def __init__(self, load_timeout: float) -> None:
        self._seconds = load_timeout + UNREACHABLE_TIMEOUT
        self._end = time.monotonic() + self._seconds

    def require_time(self, who: str, version: int, why: str) -> None:
        """Raise EngineUnavailable, with the last failure, once the time is over."""
        if time.monotonic() > self._end:
            raise EngineUnavailable(
                f"{who} did not take version {version} within {self._seconds:g} s ({why}); is the "
                "engine running, and is engine.load_timeout long enough?"
            )


@dataclass(eq=False, kw_only=True)
class WeightSync:
    """Gives ranks new weights. Call it in the trainer's thread; every call ends.

    A rank whose proxy or engine is away is retried until it is back. Raises EngineUnavailable if a
    rank did not take the weights in time, TrainingError if one refused them, both after the other
    ranks have them. Such a rank continues with its old weights if they are complete: its engine
    stamps their version on every token, so nothing is recorded under a wrong version.
    """

    call: EngineCall = field(kw_only=False)
    load_timeout: float
    in_place: bool = False
    """Calls keep their cache over an update."""
    key: str | None = None
    """The engines'."""

    def prepare(self, new: NewWeights) -> None:
        """Do the work that needs no paused engine."""

    def update(
        self, ranks: RankClients, new: NewWeights, wanted: Collection[int] | None = None
    ) -> None:
        """Give these ranks the weights, or every rank that samples for agents."""
        joining = ranks.joining
        serving = [rank for rank in ranks.sampling if rank not in joining]
        self._bring(ranks, serving if wanted is None else wanted, new)

    def repair(self, ranks: RankClients, new: NewWeights) -> None:
        """Give the weights to the ranks that sample with others, after an engine's restart."""

        sampling = ranks.sampling

        async def served() -> list[RunInfo | BaseException]:
            asked = (ranks.clients[rank].run_info() for rank in sampling)
            return await asyncio.gather(*asked, return_exceptions=True)

        stale, failures = [], []
        for rank, info in zip(sampling, self.wait(served()), strict=True):
            if isinstance(info, BaseException):
                if rank in ranks.sampling:
                    failures.append(info)
            elif info.version != new.version:
                stale.append(rank)
                log.warning(
                    "rank %d samples with version %d, not %d", rank, info.version, new.version
                )
        # A rank that does not answer must not keep the others from their weights.
        self._bring(ranks, stale, new)
        for failure in failures:
            raise failure

    def close(self) -> None:
        """Release the resources that the engines share with this process."""

    def _bring(self, ranks: RankClients, wanted: Collection[int], new: NewWeights) -> None:
        raise NotImplementedError

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the ranks' clients and return its result."""
        return self.call(work, timeout=2 * self.load_timeout + _CALL_SLACK)

    async def pause(self, ranks: RankClients, rank: int) -> None:
        """Pause a rank; the pause ends by itself if this process dies."""
        await ranks.clients[rank].pause(ttl=2 * self.load_timeout + _RELOAD_SLACK)

    async def publish(self, ranks: RankClients, rank: int, new: NewWeights) -> None:
        """Tell a rank's proxy which version its engine has now."""
        path = str(new.folder)
        await ranks.clients[rank].publish_version(version=new.version, path=path, step=new.step)


def engine_url(ranks: RankClients, rank: int) -> str:
    """Return the URL of a rank's engine; ServiceUnavailable if the rank has not reported it."""
    entry = ranks.entry(rank)
    if entry is None or entry.engine_url is None:
        raise ServiceUnavailable("its registry entry has no engine URL yet")
    return entry.engine_url
