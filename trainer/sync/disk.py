"""Weights by way of a folder that the trainer and every rank's engine see."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

import httpx

from any_agent.errors import AnyAgentError, EngineUnavailable, ServiceUnavailable, TrainingError
from any_agent.rollout import RankClients
from trainer.sync.base import RELOAD_SLACK, UNREACHABLE_TIMEOUT, EngineCall, NewWeights
from trainer.sync.engine_client import EngineClient

log = logging.getLogger(__name__)

_RETRY_DELAY = 1.0
_NOT_FLUSHED = "cache was not flushed"
"""What SGLang says that has the new weights, but is still at the last step of calls that a pause
has ended: it calls them the old version still."""
_LONGEST = 20 * UNREACHABLE_TIMEOUT
"""Seconds; the proxies are waited for, too."""


class DiskSync:
    """A :class:`trainer.sync.base.WeightSync` whose engines read the folder themselves.

    Each rank is paused for its own update only: it neither waits for the others nor keeps them.
    To load a version twice harms nothing.
    """

    def __init__(self, call: EngineCall, *, load_timeout: float, in_place: bool = False) -> None:
        self._call = call
        self._load_timeout = load_timeout
        self._in_place = in_place

    def prepare(self, new: NewWeights) -> None:
        new.write()

    def update(self, ranks: RankClients, new: NewWeights) -> None:
        self._wait(ranks.all(lambda rank: self._insist(ranks, rank, new)))

    def repair(self, ranks: RankClients, new: NewWeights) -> None:
        async def check(rank: int) -> None:
            served = (await ranks.clients[rank].run_info()).version
            if served != new.version:
                log.warning("rank %d samples with version %d, not %d", rank, served, new.version)
                await self._insist(ranks, rank, new)

        self._wait(ranks.all(check))

    def close(self) -> None:
        """Nothing is shared."""

    def _wait(self, work: Coroutine[Any, Any, object]) -> None:
        self._call(work, timeout=2 * self._load_timeout + _LONGEST)

    async def _insist(self, ranks: RankClients, rank: int, new: NewWeights) -> None:
        within = self._load_timeout + UNREACHABLE_TIMEOUT
        deadline = time.monotonic() + within
        while True:
            try:
                await self._update(ranks, rank, new)
                return
            except AnyAgentError as error:
                if not error.retryable:
                    raise
                if time.monotonic() > deadline:
                    raise EngineUnavailable(
                        f"rank {rank} did not take version {new.version} within {within:g} s "
                        f"({error.message}); is its engine running, and is engine.load_timeout "
                        "long enough?"
                    ) from error
                log.warning(
                    "rank %d has not taken version %d: %s", rank, new.version, error.message
                )
            await asyncio.sleep(_RETRY_DELAY)

    async def _update(self, ranks: RankClients, rank: int, new: NewWeights) -> None:
        client = ranks.clients[rank]
        # Ends by itself if this process dies.
        await client.pause(ttl=2 * self._load_timeout + RELOAD_SLACK)
        try:
            entry = ranks.entry(rank)
            if entry is None or entry.engine_url is None:
                raise ServiceUnavailable("it has not said where its engine is")
            await self._load(rank, entry.engine_url, new)
            path = str(new.folder)
            await client.publish_version(version=new.version, path=path, step=new.step)
        finally:
            await client.resume()

    async def _load(self, rank: int, url: str, new: NewWeights) -> None:
        body = {"model_path": str(new.folder), "weight_version": str(new.version)}
        # SGLang does not flush while calls are kept, whose cache is in use.
        flush = {"flush_cache": not self._in_place}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
            engine = EngineClient(rank, url, http, timeout=self._load_timeout)
            try:
                await _load_and_flush(engine, body | flush, new.loading)
            except TrainingError as error:
                raise TrainingError(
                    f"the engine refused version {new.version}: {error.message}"
                ) from error


async def _load_and_flush(engine: EngineClient, body: dict[str, Any], meanwhile: str) -> None:
    path = "/update_weights_from_disk"
    try:
        await engine.post(path, body)
        return
    except TrainingError as error:
        if _NOT_FLUSHED not in error.message:
            raise
    await engine.rename(meanwhile)
    await engine.flush()
    try:
        await engine.post(path, body)
    except TrainingError as error:
        raise EngineUnavailable(error.message) from error
