"""The questions and orders of SGLang's contract that are answered at once."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from any_agent.engine.sglang.requests import one_token
from any_agent.errors import EngineUnavailable

_TIMEOUT = 30.0
_FULL = (429, 503)


class EngineRefused(EngineUnavailable):
    """It answered with another status than 200."""

    told: int
    """The status."""


class EngineBusy(EngineUnavailable):
    """It is there, and takes no call now."""


class SGLangControl:
    """Of one engine, over the connections of ``http``."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def tell(self, what: str) -> dict[str, Any]:
        """`model_info` or `server_info`, also of an SGLang that only knows their earlier names.

        Raises as :meth:`ask`.
        """
        try:
            return await self.ask("GET", f"/{what}")
        except EngineRefused as error:
            if error.told != 404:
                raise
        return await self.ask("GET", f"/get_{what}")

    async def knows(self, token: int) -> bool:
        """Whether its model has this token id. Raises as :meth:`ask`; Busy if its queue is full."""
        try:
            await self.ask("POST", "/generate", one_token(biased=token))
        except EngineRefused as error:
            if error.told in _FULL:
                raise EngineBusy(error.message, retry_after=error.retry_after) from None
            if error.told != 400:
                raise
            return False
        return True

    async def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        within: float = _TIMEOUT,
    ) -> dict[str, Any]:
        """The object that it answers, {} for anything else; Refused, EngineUnavailable."""
        limit = aiohttp.ClientTimeout(total=within)
        try:
            async with self._http.request(
                method, self._url + path, json=body, timeout=limit
            ) as response:
                raw = await response.read()
                if response.status != 200:
                    raise _refused(response.status, path, raw)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(
                f"the inference engine does not answer ({type(error).__name__}); try again later",
                retry_after=2,
            ) from error
        try:
            data = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return {}
        return data if isinstance(data, dict) else {}


def _refused(told: int, path: str, raw: bytes) -> EngineRefused:
    said = raw[:300].decode(errors="replace")
    error = EngineRefused(f"the engine answered {path} with {told}: {said}", retry_after=2)
    error.told = told
    return error
