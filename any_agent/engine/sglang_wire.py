"""The JSON of SGLang's ``/generate`` as its client sees it: bodies, streams, answers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from any_agent.errors import EngineUnavailable, InvalidRequest
from any_agent.types import GenerationChunk, ModelRequest, StopReason


def generate_body(request: ModelRequest, *, stream: bool) -> dict[str, Any]:
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
        # SGLang heeds it only with --enable-deterministic-inference.
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


class ChunkReader:
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
        return [version_number(meta["weight_version"])] * (end - start)
    out: list[int] = []
    for span in spans:
        first, last = max(int(span["start"]), start), min(int(span["end"]), end)
        out += [version_number(span["version"])] * max(0, last - first)
    if len(out) != end - start:
        raise EngineUnavailable("the engine's weight versions do not cover its tokens")
    return out


def version_number(version: Any) -> int:
    """SGLang calls the weights that it was started with "default". ValueError if it is none."""
    return 0 if version == "default" else int(version)


def slots_of(info: dict[str, Any]) -> int | None:
    """Requests that an engine samples at once, from its `/get_server_info`; None if untold.

    What SGLang was started with is often not set; what follows from its memory it tells of each of
    its data-parallel schedulers.
    """
    states = info.get("internal_states")
    states = [state for state in states if isinstance(state, dict)] if states else []
    each = [state.get("effective_max_running_requests_per_dp") for state in states]
    known = [number for number in each if isinstance(number, int) and number > 0]
    if known:
        return sum(known)
    told = info.get("max_running_requests")
    return told if isinstance(told, int) and told > 0 else None


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
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


async def failure(response: aiohttp.ClientResponse) -> Exception:
    """What an answer with another status than 200 means."""
    text = (await response.read())[:500].decode(errors="replace")
    if response.status == 400:
        return InvalidRequest(f"the engine refused the request: {text}")
    return EngineUnavailable(f"the engine answered {response.status}: {text}", retry_after=2)
