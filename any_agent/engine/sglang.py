"""The client of SGLang's native HTTP contract; the embedded engine speaks it too."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

import aiohttp
import orjson

from any_agent.engine.gate import UpdateGate
from any_agent.engine.seam import SeamMatcher
from any_agent.errors import ConfigError, EngineUnavailable, InvalidRequest
from any_agent.types import GenerationChunk, ModelRequest, StopReason

log = logging.getLogger(__name__)

_KEEPALIVE = 3.0
"""Seconds; below the 5 after which uvicorn, and so SGLang, closes an idle connection."""
_CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=30)


class SGLangEngine:
    """One engine process, reached by URL.

    ``decode`` turns token ids into text; it is needed to match stop strings that begin before a
    weight update and end after it. Open it inside a running event loop; ``close`` it.
    """

    def __init__(
        self,
        url: str,
        *,
        decode: Callable[[Sequence[int]], str],
        update_mode: Literal["resume", "in_place"] = "resume",
        update_wait: float = 120.0,
        request_timeout: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._decode = decode
        self._pause_mode = "abort" if update_mode == "resume" else "in_place"
        self._gate = UpdateGate(max_wait=update_wait)
        self._version = 0
        # No limit on connections: the proxy bounds the calls under way, and a pool that is
        # full would be a hidden queue. No total time-out: a long completion is not an error.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=request_timeout),
            json_serialize=lambda data: orjson.dumps(data).decode(),
        )
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        return self._version

    @property
    def paused(self) -> bool:
        return not self._gate.is_open

    async def close(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=2)
        await self._http.close()

    async def info(self) -> dict[str, Any]:
        """The engine's `/get_model_info`; EngineUnavailable if it does not answer."""
        data = await self._control("GET", "/get_model_info")
        version = str(data.get("weight_version", ""))
        if version.isdigit():
            self._version = int(version)
        return data

    async def context_length(self) -> int:
        """Tokens of prompt and output together that the engine takes; ConfigError if unknown."""
        told = (await self.info()).get("context_length")
        if told is None:
            # SGLang says only how long a prompt may be, a few tokens less.
            told = (await self._control("GET", "/get_server_info")).get("max_req_input_len")
        if told is None:
            raise ConfigError(
                f"the engine at {self.url} does not say how long its context is; "
                "set engine.context_length"
            )
        return int(told)

    async def pause(self) -> None:
        self._gate.close()
        await self._control("POST", "/pause_generation", {"mode": self._pause_mode})

    async def resume(self, version: int) -> None:
        await self._control("POST", "/continue_generation", {})
        self._version = version
        self._gate.open()

    async def generate(
        self, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[GenerationChunk]:
        done: list[int] = []
        attempt = 0
        while True:
            await self._gate.passed()
            closings = self._gate.closings
            part = replace(
                request,
                rid=f"{request.rid}-{attempt}" if attempt else request.rid,
                input_ids=request.input_ids + done,
                gconfig=request.gconfig.new(
                    max_new_tokens=request.gconfig.max_new_tokens - len(done)
                ),
            )
            seam = SeamMatcher(done, request.gconfig.stop, self._decode)
            last: GenerationChunk | None = None
            async with aclosing(self._attempt(part, stream=stream)) as chunks:
                async for raw in chunks:
                    chunk = seam.cut(raw)
                    done += chunk.output_ids
                    last = chunk
                    if chunk.stop_reason == "abort":
                        break
                    yield chunk
                    if chunk.stop_reason is not None:
                        return
            if last is None or last.stop_reason is None:
                raise EngineUnavailable("the engine ended a stream without an end", retry_after=2)
            if self._gate.closings == closings:
                raise EngineUnavailable("the engine aborted the request; try again", retry_after=2)
            # An update came in between: what was sampled stays, and the rest is sampled from
            # prompt + partial output, computed anew under the new weights.
            budget_spent = len(done) >= request.gconfig.max_new_tokens
            yield replace(last, stop_reason="length" if budget_spent else None)
            if budget_spent:
                return
            attempt += 1

    async def _attempt(
        self, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[GenerationChunk]:
        finished = False
        try:
            async with self._http.post(
                f"{self.url}/generate", json=_generate_body(request, stream=stream)
            ) as response:
                if response.status != 200:
                    raise await _failure(response)
                reader = _ChunkReader()
                if stream:
                    async for event in _events(response):
                        chunk = reader.read(event)
                        finished = chunk.stop_reason is not None
                        yield chunk
                        if finished:
                            return
                else:
                    chunk = reader.read(orjson.loads(await response.read()))
                    finished = True
                    yield chunk
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
            raise EngineUnavailable(
                f"the inference engine failed ({type(error).__name__}); try again",
                retry_after=2,
            ) from error
        finally:
            if not finished:
                self._abort(request.rid)

    def _abort(self, rid: str) -> None:
        """Tell the engine that nobody waits for this request; never blocks, never fails."""

        async def send() -> None:
            try:
                await self._control("POST", "/abort_request", {"rid": rid})
            except EngineUnavailable:
                log.debug("could not abort %s: the engine is away", rid)

        task = asyncio.get_running_loop().create_task(send())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _control(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            async with self._http.request(
                method, self.url + path, json=body, timeout=_CONTROL_TIMEOUT
            ) as response:
                raw = await response.read()
                if response.status != 200:
                    raise EngineUnavailable(
                        f"the engine answered {path} with {response.status}: "
                        f"{raw[:300].decode(errors='replace')}",
                        retry_after=2,
                    )
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


def _generate_body(request: ModelRequest, *, stream: bool) -> dict[str, Any]:
    g = request.gconfig
    sampling: dict[str, Any] = {
        "max_new_tokens": g.max_new_tokens,
        "temperature": g.temperature,
        "top_p": g.top_p,
        "top_k": g.top_k,
        "ignore_eos": g.ignore_eos,
    }
    if g.stop:
        sampling["stop"] = list(g.stop)
    if g.stop_token_ids:
        sampling["stop_token_ids"] = list(g.stop_token_ids)
    if g.seed is not None:
        sampling["sampling_seed"] = g.seed
    body: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": stream,
    }
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    return body


class _ChunkReader:
    """Reads answers of one request: cumulative streams, incremental ones, and whole answers."""

    def __init__(self) -> None:
        self._seen = 0

    def read(self, event: Any) -> GenerationChunk:
        """The tokens that an answer adds; EngineUnavailable if it has another form."""
        if not isinstance(event, dict) or "error" in event or "meta_info" not in event:
            raise EngineUnavailable(f"the engine failed: {str(event)[:300]}", retry_after=2)
        try:
            return self._read(event, event["meta_info"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineUnavailable(
                f"the engine's answer cannot be read ({error!r}): {str(event)[:300]}",
                retry_after=2,
            ) from None

    def _read(self, event: dict[str, Any], meta: dict[str, Any]) -> GenerationChunk:
        total = int(meta["completion_tokens"])
        fresh = total - self._seen
        # Whatever the stream's kind, the new tokens are the last ones.
        ids = [int(i) for i in event["output_ids"][-fresh:]] if fresh else []
        entries = meta["output_token_logprobs"][-fresh:] if fresh else []
        logprobs = [float(entry[0]) for entry in entries]
        if len(ids) != fresh or [int(entry[1]) for entry in entries] != ids:
            raise EngineUnavailable("the engine's ids and log-probabilities disagree")
        if not all(map(math.isfinite, logprobs)):
            raise EngineUnavailable("the engine answered a log-probability that is not finite")
        versions = _versions(meta, self._seen, total)
        self._seen = total
        finish = meta.get("finish_reason")
        reason: StopReason | None = None
        matched = None
        if finish is not None:
            reason = finish["type"]
            matched = finish.get("matched")
        return GenerationChunk(ids, logprobs, versions, reason, matched)


def _versions(meta: dict[str, Any], start: int, end: int) -> list[int]:
    """The version of each token in [start, end): from the spans, else the answer's one version."""
    spans = meta.get("weight_versions")
    if not spans:
        return [_number(meta["weight_version"])] * (end - start)
    out: list[int] = []
    for span in spans:
        first, last = max(int(span["start"]), start), min(int(span["end"]), end)
        out += [_number(span["version"])] * max(0, last - first)
    if len(out) != end - start:
        raise EngineUnavailable("the engine's weight versions do not cover its tokens")
    return out


def _number(version: Any) -> int:
    """SGLang calls the weights that it was started with "default"."""
    return 0 if version == "default" else int(version)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event until `[DONE]`; lines of any length."""
    buffer = b""
    async for block in response.content.iter_any():
        buffer += block
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if data:
                yield orjson.loads(data)


async def _failure(response: aiohttp.ClientResponse) -> Exception:
    text = (await response.read())[:500].decode(errors="replace")
    if response.status == 400:
        return InvalidRequest(f"the engine refused the request: {text}")
    return EngineUnavailable(f"the engine answered {response.status}: {text}", retry_after=2)
