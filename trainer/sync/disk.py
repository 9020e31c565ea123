"""Weights by way of a folder that the trainer and every rank's engine see."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from any_agent.errors import AnyAgentError, EngineUnavailable, TrainingError
from any_agent.rollout import RankClients
from any_agent.rundir.checksums import damage
from trainer.sync import base
from trainer.sync.base import NewWeights, UpdateDeadline, WeightSync, engine_url
from trainer.sync.engine_client import EngineClient, control_session

log = logging.getLogger(__name__)

_RESUME_TIMEOUT = 10.0  # seconds for a rank's resume after a failed update
_NOT_FLUSHED = "cache was not flushed"
"""Part of SGLang's message when it has the new weights, but is still at the last step of calls
that a pause has ended: it keeps the old version's name then."""


class DiskSync(WeightSync):
    """A weight sync whose engines read the folder themselves.

    Each rank is paused for its own update only: it neither waits for the others nor delays them.
    Loading a version twice is harmless.
    """

    def prepare(self, new: NewWeights) -> None:
        new.write()

    def _bring(self, ranks: RankClients, wanted: Collection[int], new: NewWeights) -> None:
        def load() -> None:
            self.wait(ranks.all(lambda rank: self._retry(ranks, rank, new), list(wanted)))

        try:
            load()
        except TrainingError:
            if damage(new.folder) is None:
                raise
            # The engines found what happened to the folder since it was written.
            new.write()
            load()

    async def _retry(self, ranks: RankClients, rank: int, new: NewWeights) -> None:
        deadline = UpdateDeadline(self.load_timeout)
        while True:
            try:
                await self._update(ranks, rank, new)
                return
            except AnyAgentError as error:
                if rank not in ranks.sampling:
                    # It was drained meanwhile.
                    return
                if not error.retryable:
                    raise
                deadline.require_time(f"rank {rank}", new.version, error.message)
                log.warning(
                    "rank %d has not taken version %d: %s", rank, new.version, error.message
                )
            await asyncio.sleep(base.RETRY_DELAY)

    async def _update(self, ranks: RankClients, rank: int, new: NewWeights) -> None:
        await self.pause(ranks, rank)
        try:
            async with control_session(self.key) as http:
                url = engine_url(ranks, rank)
                await self._load(EngineClient(rank, url, http, timeout=self.load_timeout), new)
            await self.publish(ranks, rank, new)
        except BaseException:
            # An engine without whole weights does not resume, which is not the error; once it has
            # them, its proxy resumes by itself.
            with suppress(AnyAgentError, TimeoutError):
                async with asyncio.timeout(_RESUME_TIMEOUT):
                    await ranks.clients[rank].resume()
            raise
        await ranks.clients[rank].resume()

    async def _load(self, engine: EngineClient, new: NewWeights) -> None:
        path = "/update_weights_from_disk"
        body: dict[str, Any] = {"model_path": str(new.folder), "weight_version": str(new.version)}
        # SGLang does not flush while calls are kept, whose cache is in use.
        body["flush_cache"] = not self.in_place
        try:
            await engine.post(path, body)
            return
        except TrainingError as error:
            if _NOT_FLUSHED not in error.message:
                raise TrainingError(
                    f"the engine refused version {new.version}: {error.message}"
                ) from error
        await engine.rename(new.loading)
        await engine.flush()
        try:
            await engine.post(path, body)
        except TrainingError as error:
            raise EngineUnavailable(error.message) from error
