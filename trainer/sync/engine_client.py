"""One rank's engine, as whoever gives it weights talks to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from any_agent.errors import EngineUnavailable, NotFound, TrainingError

_ANSWERS_TIMEOUT = 10.0
"""Seconds for what an engine says of itself."""
_IDLE_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself."""

    embedded: bool
    """Ours: it puts new weights in all at once, and its checksums are of a checkpoint's tensors."""
    cuda: bool
    dtype: str
    """`float32`, `bfloat16`, ...; `auto` where SGLang was left to choose."""
    processes: int
    """That share the model's layers; each is a member of a process group."""
    started: str = ""
    """When: another process at the same URL tells something else."""


class EngineClient:
    """Its control routes. Errors name it; `EngineUnavailable` is worth another try."""

    def __init__(self, rank: int, url: str, http: httpx.AsyncClient, *, timeout: float) -> None:
        self.rank, self.url = rank, url
        self._http, self._timeout = http, timeout
        self.about = EngineInfo(False, False, "auto", 1)

    @property
    def identity(self) -> tuple[str, str]:
        """Of its process, once it was looked at."""
        return self.url, self.about.started

    async def look(self) -> None:
        """Learn what it is."""
        try:
            told = await self._ask("GET", "/server_info", None, _ANSWERS_TIMEOUT)
        except NotFound:
            # An older SGLang.
            told = await self._ask("GET", "/get_server_info", None, _ANSWERS_TIMEOUT)
        try:
            self.about = EngineInfo(
                embedded=told.get("engine") == "any-agent embedded",
                cuda=str(told.get("device", "")).startswith("cuda"),
                dtype=str(told.get("dtype", "auto")),
                processes=int(told.get("tp_size") or 1),
                started=str(told.get("startup_time", "")),
            )
        except (TypeError, ValueError) as error:
            raise self._unreadable("/server_info") from error

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer. EngineUnavailable if it is away or failed; TrainingError if it refused."""
        return await self._ask("POST", path, body, self._timeout)

    async def rename(self, version: str) -> None:
        """What it calls its weights. A name that is no number is no version: nobody samples."""
        body = {"new_version": version, "abort_all_requests": False}
        await self.post("/update_weight_version", body)

    async def flush(self) -> None:
        """Forget what is cached. EngineUnavailable while it has calls.

        SGLang may be at the last step of calls that a pause has ended already: it waits for that.
        """
        try:
            await self.post(f"/flush_cache?timeout={_IDLE_TIMEOUT:g}", {})
        except TrainingError as error:
            raise EngineUnavailable(error.message) from error

    async def checksums(self) -> list[dict[str, str]]:
        """Of its weights, by their names there: one mapping per process; [] where it has none."""
        try:
            answer = await self.post("/weights_checker", {"action": "checksum"})
        except NotFound:
            return []
        try:
            return [dict(told["checksums"]) for told in answer.get("ranks") or []]
        except (LookupError, TypeError, ValueError) as error:
            raise self._unreadable("/weights_checker") from error

    def _unreadable(self, path: str) -> EngineUnavailable:
        return EngineUnavailable(f"the engine at {self.url} answered {path} with what is none")

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, within: float
    ) -> dict[str, Any]:
        content = orjson.dumps(body) if body is not None else None
        try:
            async with asyncio.timeout(within):
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
            answer = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            answer = {}
        answer = answer if isinstance(answer, dict) else {}
        said = str(answer.get("message") or response.text)[:300]
        if response.status_code == 404:
            raise NotFound(f"the engine at {self.url} has no {path}")
        if response.status_code >= 500:
            raise EngineUnavailable(f"the engine at {self.url} failed at {path}: {said}")
        if response.status_code != 200 or answer.get("success") is False:
            raise TrainingError(f"the engine at {self.url} refused {path}: {said}")
        return answer
