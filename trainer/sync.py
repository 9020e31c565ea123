"""New weights to every rank's engine, without a call lost: pause, load, publish, resume."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import httpx

from any_agent.errors import AnyAgentError, EngineUnavailable, ServiceUnavailable, TrainingError
from any_agent.rollout import Ranks

log = logging.getLogger(__name__)

_RELOAD_SLACK = 60.0
_AWAY = 60.0
"""Seconds, on top of those that loading may take, that a rank which restarts is waited for."""
_AGAIN_AFTER = 1.0


class DiskSync:
    """Weights by way of a folder that the trainer and every rank's engine see.

    Each rank is paused for its own update only: it neither waits for the others nor keeps them.
    """

    def __init__(self, *, load_timeout: float) -> None:
        self._load_timeout = load_timeout

    async def update(self, ranks: Ranks, path: Path, *, version: int, step: int) -> None:
        """Make every rank sample with the weights in ``path`` as ``version``.

        A rank that is away, proxy or engine, is tried again until it is back; to load a version
        twice harms nothing. Raises EngineUnavailable if one did not take it in time, TrainingError
        if one refused it, both once the others have it. That rank goes on with what it has: its
        engine stamps that on every token, so nothing is recorded under a wrong version.
        """
        await ranks.all(lambda rank: self._insist(ranks, rank, path, version, step))

    async def repair(self, ranks: Ranks, path: Path, *, version: int, step: int) -> None:
        """As `update`, for the ranks that sample with something else: an engine was restarted."""

        async def check(rank: int) -> None:
            served = (await ranks.clients[rank].run_info()).version
            if served != version:
                log.warning("rank %d samples with version %d, not %d", rank, served, version)
                await self._insist(ranks, rank, path, version, step)

        await ranks.all(check)

    async def _insist(self, ranks: Ranks, rank: int, path: Path, version: int, step: int) -> None:
        deadline = time.monotonic() + self._load_timeout + _AWAY
        while True:
            try:
                await self._update(ranks, rank, path, version, step)
                return
            except AnyAgentError as error:
                if not error.retryable:
                    raise
                if time.monotonic() > deadline:
                    raise EngineUnavailable(
                        f"rank {rank} did not take version {version} within "
                        f"{self._load_timeout + _AWAY:g} s ({error.message}); is its engine "
                        "running, and is engine.load_timeout long enough?"
                    ) from error
                log.warning("rank %d has not taken version %d: %s", rank, version, error.message)
            await asyncio.sleep(_AGAIN_AFTER)

    async def _update(self, ranks: Ranks, rank: int, path: Path, version: int, step: int) -> None:
        client = ranks.clients[rank]
        # Ends by itself if this process dies.
        await client.pause(ttl=2 * self._load_timeout + _RELOAD_SLACK)
        try:
            entry = ranks.entry(rank)
            if entry is None or entry.engine_url is None:
                raise ServiceUnavailable("it has not said where its engine is")
            await self._load(entry.engine_url, path, version)
            await client.publish_version(version=version, path=str(path), step=step)
        finally:
            await client.resume()

    async def _load(self, engine_url: str, path: Path, version: int) -> None:
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": True}
        try:
            async with (
                asyncio.timeout(self._load_timeout),
                httpx.AsyncClient(timeout=None, trust_env=False) as http,
            ):
                url = f"{engine_url}/update_weights_from_disk"
                response = await http.post(url, json=body)
        except (httpx.TransportError, TimeoutError) as error:
            raise EngineUnavailable(
                f"the engine at {engine_url} does not answer ({type(error).__name__})"
            ) from error
        if response.status_code >= 500:
            raise EngineUnavailable(f"the engine at {engine_url} failed: {response.text[:300]}")
        if response.status_code != 200 or not response.json().get("success"):
            raise TrainingError(f"the engine refused version {version}: {response.text[:300]}")
