"""New weights to the engine, without a call lost: pause, load, publish, resume."""

from __future__ import annotations

from pathlib import Path

import httpx

from any_agent.client import RLClient
from any_agent.errors import EngineUnavailable

_PAUSE_TTL = 300.0
_LOAD_TIMEOUT = 240.0
"""Below the pause's ttl: an engine must not go on while it may still be loading."""


class DiskSync:
    """Weights by way of a folder that trainer and engine both see."""

    def __init__(self, engine_url: str) -> None:
        self._engine_url = engine_url.rstrip("/")

    async def update(self, client: RLClient, path: Path, *, version: int, step: int) -> None:
        """Make the engine sample with the weights in ``path`` as ``version``.

        Raises EngineUnavailable if the engine did not take them; it goes on with the old ones.
        """
        await client.pause(ttl=_PAUSE_TTL)
        try:
            await self._load(path, version)
            await client.publish_version(version=version, path=str(path), step=step)
        finally:
            await client.resume()

    async def _load(self, path: Path, version: int) -> None:
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": True}
        try:
            async with httpx.AsyncClient(timeout=_LOAD_TIMEOUT) as http:
                response = await http.post(
                    f"{self._engine_url}/update_weights_from_disk", json=body
                )
        except httpx.TransportError as error:
            raise EngineUnavailable(
                f"the engine at {self._engine_url} did not take version {version} "
                f"({type(error).__name__})"
            ) from error
        if response.status_code != 200 or not response.json().get("success"):
            raise EngineUnavailable(f"the engine refused version {version}: {response.text[:300]}")
