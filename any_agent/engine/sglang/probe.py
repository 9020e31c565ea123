"""Direct requests to one engine, whose replies are returned unchanged."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from any_agent.engine.sglang.client import SGLangEngine
from any_agent.engine.sglang.requests import (
    JSON_HEADERS,
    EngineRefused,
    describe,
    failure,
    generate_body,
    version_number,
)
from any_agent.engine.sglang.responses import ChunkReader, events
from any_agent.errors import EngineUnavailable
from any_agent.types import GenerationChunk, GenerationHyperparameters, ModelRequest

_SECONDS = 60.0  # the longest time that one answer may take
_TIMEOUT = aiohttp.ClientTimeout(total=_SECONDS, sock_connect=5)


@dataclass(frozen=True, slots=True)
class EngineReply:
    """One reply, as the engine sent it."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    text: str | None
    prompt_tokens: int | None
    reason: str
    matched: str | int | None


class EngineProbe(SGLangEngine):
    """The client of one engine that also sends direct requests.

    Each of these ends in bounded time, and raises AnyAgentError if it fails.
    """

    async def start_options(self) -> dict[str, Any]:
        """Return what the engine was started with; {} if it does not report that."""
        with contextlib.suppress(EngineUnavailable):
            return await self.server_info()
        return {}

    async def ask(self, ids: Sequence[int], *, strict: bool = True, **sampling: Any) -> EngineReply:
        """Sample a completion; ``sampling`` are fields of GenerationHyperparameters.

        ``strict``: refuse what the service would refuse (EngineMismatch).
        """
        request = _request(ids, **sampling)
        async with self._post(request, stream=False) as response:
            event = orjson.loads(await response.read())
        versions = ChunkReader(request).read(event).versions if strict else []
        try:
            meta = event["meta_info"]
            entries = meta["output_token_logprobs"]
            finish = meta["finish_reason"]
            return EngineReply(
                [int(entry[1]) for entry in entries],
                [float(entry[0]) for entry in entries],
                versions,
                event.get("text"),
                meta.get("prompt_tokens"),
                str(finish["type"]),
                finish.get("matched"),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineUnavailable(
                f"the engine's answer cannot be read ({type(error).__name__}; {describe(event)})"
            ) from None

    async def stream(
        self, ids: Sequence[int], rid: str, **sampling: Any
    ) -> AsyncGenerator[GenerationChunk]:
        """Sample a completion; yield its chunks as they come."""
        request = _request(ids, rid=rid, **sampling)
        reader = ChunkReader(request)
        async with self._post(request, stream=True) as response:
            async for event in events(response):
                yield reader.read(event)

    async def abort(self, rid: str) -> None:
        with contextlib.suppress(EngineRefused):
            await self._control.request("POST", "/abort_request", {"rid": rid})

    @asynccontextmanager
    async def _post(
        self, request: ModelRequest, *, stream: bool
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        body = generate_body(request, stream=stream)
        with _bounded():
            async with self._http.post(
                f"{self.url}/generate", data=body, headers=JSON_HEADERS, timeout=_TIMEOUT
            ) as response:
                if response.status != 200:
                    raise await failure(response)
                yield response


@asynccontextmanager
async def probe_engine(url: str, *, key: str | None = None) -> AsyncIterator[EngineProbe]:
    """Connect to an engine; nothing is sent yet. ``key`` is the one that it requires."""
    engine = EngineProbe(url, decode=lambda _: "", key=key)
    try:
        yield engine
    finally:
        await engine.close()


def reported_version(info: dict[str, Any]) -> int | None:
    """Return the weight version of a `/model_info`; None if it is not a version."""
    version = info.get("weight_version")
    try:
        return version_number(version) if isinstance(version, str | int) else None
    except ValueError:
        return None


@contextlib.contextmanager
def _bounded() -> Any:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        raise EngineUnavailable(
            f"the engine sent no readable answer within {_SECONDS:g} s ({type(error).__name__})"
        ) from error


def _request(ids: Sequence[int], rid: str = "", **sampling: Any) -> ModelRequest:
    rid = rid or f"doctor-{uuid.uuid4().hex}"
    return ModelRequest(rid, list(ids), GenerationHyperparameters(**sampling))
