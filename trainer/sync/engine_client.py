"""The client of one rank's engine for weight updates."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from any_agent.errors import EngineUnavailable, NotFound, TrainingError

_INFO_TIMEOUT = 10.0
_IDLE_TIMEOUT = 20.0  # seconds that an engine waits for its last calls before it flushes


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The properties that an engine reports."""

    embedded: bool
    """The embedded engine: it replaces all weights at once, and its checksums are those of a
    checkpoint's tensors."""
    cuda: bool
    dtype: str
    """`float32`, `bfloat16`, ...; `auto` if SGLang was to choose."""
    processes: int
    """The processes that share the model's layers; each is a member of a process group."""
    started: str = ""
    """The time of its start, which distinguishes two processes at one URL."""


class EngineClient:
    """One engine's control routes. Errors name the engine; EngineUnavailable may be retried."""

    def __init__(self, rank: int, url: str, http: httpx.AsyncClient, *, timeout: float) -> None:
        self.rank, self.url = rank, url
        self._http, self._timeout = http, timeout
        self.info = EngineInfo(False, False, "auto", 1)

    @property
    def identity(self) -> tuple[str, str]:
        """The engine's process, by its URL and start; valid after :meth:`fetch_info`."""
        return self.url, self.info.started

    async def fetch_info(self) -> None:
        """Read the engine's properties."""
        try:
            reply = await self._request("GET", "/server_info", None, _INFO_TIMEOUT)
        except NotFound:
            # An older SGLang.
            reply = await self._request("GET", "/get_server_info", None, _INFO_TIMEOUT)
        try:
            self.info = EngineInfo(
                embedded=reply.get("engine") == "any-agent embedded",
                cuda=str(reply.get("device", "")).startswith("cuda"),
                dtype=str(reply.get("dtype", "auto")),
                processes=int(reply.get("tp_size") or 1),
                started=str(reply.get("startup_time", "")),
            )
        except (TypeError, ValueError) as error:
            raise self._unreadable("/server_info") from error

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the reply; EngineUnavailable without a good one, TrainingError for a refusal."""
        return await self._request("POST", path, body, self._timeout)

    async def rename(self, version: str) -> None:
        """Name the engine's weights. A name other than a number is no version: no call samples."""
        body = {"new_version": version, "abort_all_requests": False}
        await self.post("/update_weight_version", body)

    async def flush(self) -> None:
        """Empty the engine's cache; EngineUnavailable while it has calls.

        SGLang may still be at the last step of calls that a pause has ended; it waits for that.
        """
        try:
            await self.post(f"/flush_cache?timeout={_IDLE_TIMEOUT:g}", {})
        except TrainingError as error:
            raise EngineUnavailable(error.message) from error

    async def checksums(self) -> list[dict[str, str]]:
        """Return each process's checksums by the engine's weight names; [] without such a route."""
        try:
            reply = await self.post("/weights_checker", {"action": "checksum"})
        except NotFound:
            return []
        try:
            return [dict(each["checksums"]) for each in reply.get("ranks") or []]
        except (LookupError, TypeError, ValueError) as error:
            raise self._unreadable("/weights_checker") from error

    def _unreadable(self, path: str) -> EngineUnavailable:
        return EngineUnavailable(f"the engine at {self.url} answered {path} in an unknown form")

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, limit: float
    ) -> dict[str, Any]:
        content = orjson.dumps(body) if body is not None else None
        try:
            async with asyncio.timeout(limit):
                response = await self._http.request(
                    method,
                    self.url + path,
                    content=content,
                    headers={"Content-Type": "application/json"},
                )
        except (httpx.TransportError, TimeoutError) as error:
            raise EngineUnavailable(
                f"the engine at {self.url} does not answer ({type(error).__name__})"
            ) from error
        try:
            reply = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            reply = {}
        reply = reply if isinstance(reply, dict) else {}
        message = str(reply.get("message") or response.text)[:300]
        if response.status_code == 404:
            raise NotFound(f"the engine at {self.url} has no route {path}")
        if response.status_code >= 500:
            raise EngineUnavailable(f"the engine at {self.url} failed at {path}: {message}")
        if response.status_code != 200 or reply.get("success") is False:
            raise TrainingError(f"the engine at {self.url} refused {path}: {message}")
        return reply
