"""New weights to the engine, without a call lost: pause, load, publish, resume."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from any_agent.errors import EngineUnavailable
from any_agent.rollout import Ranks

_RELOAD_SLACK = 60.0


class DiskSync:
    """Weights by way of a folder that the trainer and every rank's engine see."""

    def __init__(self, *, load_timeout: float) -> None:
        self._load_timeout = load_timeout

    async def update(self, ranks: Ranks, path: Path, *, version: int, step: int) -> None:
        """Make every rank's engine sample with the weights in ``path`` as ``version``.

        Raises EngineUnavailable if an engine did not take them in time. It goes on all the same:
        whatever it serves, it stamps on every token, so nothing is recorded under a wrong version.
        """
        await ranks.all(lambda rank: self._update(ranks, rank, path, version, step))

    async def _update(self, ranks: Ranks, rank: int, path: Path, version: int, step: int) -> None:
        client = ranks.clients[rank]
        try:
            # Ends by itself if this process dies.
            await client.pause(ttl=2 * self._load_timeout + _RELOAD_SLACK)
            entry = ranks.entry(rank)
            await self._load((entry and entry.engine_url) or "", path, version)
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
                f"the engine at {engine_url} did not take version {version} within "
                f"{self._load_timeout:g} s ({type(error).__name__}); is it running, and is "
                "engine.load_timeout long enough?"
            ) from error
        if response.status_code != 200 or not response.json().get("success"):
            raise EngineUnavailable(f"the engine refused version {version}: {response.text[:300]}")
