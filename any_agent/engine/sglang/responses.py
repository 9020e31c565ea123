"""The reader of SGLang's answers to ``/generate``, which refuses impossible values.

The cost of an event does not grow with the output: only its end is read. (A cumulative stream must
still be parsed completely, so start SGLang with ``--incremental-streaming-output``.)
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from any_agent.engine.sglang.requests import describe, refusal, version_number
from any_agent.errors import EngineMismatch, EngineUnavailable, InvalidRequest
from any_agent.types import GenerationChunk, ModelRequest, StopReason

_REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_ROUNDING = 1e-4
"""The most by which rounding may lift a log-probability above 0: a softmax in bfloat16."""


class ChunkReader:
    """Reads answers to one request: cumulative streams, incremental ones, and whole answers.

    ``vocab_size``: the number of the model's token ids; None accepts any id that is not negative.
    """

    def __init__(self, request: ModelRequest, vocab_size: int | None = None) -> None:
        self._ids = range(vocab_size or sys.maxsize)
        self._prompt = len(request.input_ids)
        self._limit = request.gconfig.max_new_tokens
        self._top = request.top_logprobs
        self._adapter = request.adapter
        self._seen = 0
        self._version_name: Any = None
        self._version = -1

    def read(self, event: Any) -> GenerationChunk:
        """Return the tokens that an answer adds.

        Raises EngineUnavailable if the answer has another form or reports a failure of the engine,
        EngineMismatch if it is no answer to this request, InvalidRequest if it is a refusal.
        """
        if isinstance(event, dict) and isinstance(event.get("error"), dict):
            raise refusal(_status_of(event["error"]), event["error"])
        if not isinstance(event, dict) or "error" in event or "meta_info" not in event:
            raise EngineUnavailable(
                f"the engine's answer has an unknown form ({describe(event)})", retry_after=2
            )
        try:
            return self._read(event, event["meta_info"])
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise EngineUnavailable(
                f"the engine's answer cannot be read ({type(error).__name__}; {describe(event)})",
                retry_after=2,
            ) from None

    def _read(self, event: dict[str, Any], meta: dict[str, Any]) -> GenerationChunk:
        finish = meta.get("finish_reason")
        reason = None if finish is None else _REASONS[finish["type"]]
        if finish is not None and reason == "abort":
            _raise_refusal(finish)
        total = int(meta["completion_tokens"])
        fresh = total - self._seen
        if fresh < 0 or total > self._limit:
            raise EngineMismatch(f"the engine sampled {total} tokens of at most {self._limit}")
        adapter = self._sampled_by(meta)
        if not fresh:
            return GenerationChunk([], [], [], reason, _matched(finish), [] if self._top else None)
        # In every kind of stream the new tokens are the last ones.
        entries = meta["output_token_logprobs"][-fresh:]
        ids = [int(entry[1]) for entry in entries]
        logprobs = [float(entry[0]) for entry in entries]
        # A request aborted in SGLang's queue repeats its last id, and has no prompt length.
        if len(ids) != fresh or (reason != "abort" and event["output_ids"][-fresh:] != ids):
            raise EngineMismatch("the engine's ids and log-probabilities disagree")
        prompt = meta.get("prompt_tokens")
        if prompt != self._prompt and not (prompt is None and reason == "abort"):
            read = int(prompt or 0)  # not as it came: an answer is quoted nowhere
            raise EngineMismatch(
                f"the engine read {read} prompt tokens instead of {self._prompt}: it truncates "
                "prompts, or adds to them; check the options that it was started with"
            )
        for token in ids:
            if token not in self._ids:
                raise EngineMismatch(f"the engine sampled {token}, which is no id of the model's")
        for logprob in logprobs:
            if not -math.inf < logprob <= _ROUNDING:
                raise EngineMismatch(f"the engine answered {logprob} as a log-probability")
        top = _top(meta["output_top_logprobs"][-fresh:], fresh) if self._top else None
        # The embedded engine alone has it.
        told = "output_token_bound" in meta
        bound = _bound(meta["output_token_bound"][-fresh:]) if told else None
        versions = self._versions(meta, total)
        self._seen = total
        return GenerationChunk(
            ids, logprobs, versions, reason, _matched(finish), top, bound, adapter
        )

    def _sampled_by(self, meta: dict[str, Any]) -> str | None:
        """Return the adapter that an answer names, with its fingerprint.

        EngineMismatch unless it is the request's: an engine that ignores adapters names none.
        """
        adapter = meta.get("adapter")
        name = None if adapter is None else str(adapter).partition("@")[0]
        if name != self._adapter:
            asked = "the model alone" if self._adapter is None else f"the adapter {self._adapter!a}"
            told = "none" if name is None else "another one"
            raise EngineMismatch(
                f"the call asked for {asked}, and of adapters the engine's answer names {told}: "
                "only the embedded engine serves them"
            )
        return None if adapter is None else str(adapter)

    def _versions(self, meta: dict[str, Any], end: int) -> list[int]:
        """Return the version of each new token: from the spans, else the answer's one version."""
        start = self._seen
        spans = meta.get("weight_versions")
        if not spans:
            return [self._advance(meta["weight_version"])] * (end - start)
        out: list[int] = []
        for span in spans:
            first, last = max(int(span["start"]), start), min(int(span["end"]), end)
            if first < last:
                out += [self._advance(span["version"])] * (last - first)
        if len(out) != end - start:
            raise EngineMismatch("the engine's weight versions do not cover its tokens")
        return out

    def _advance(self, name: Any) -> int:
        """Return the version as a number; EngineMismatch if it is below an earlier one."""
        if name != self._version_name:
            version = version_number(name)
            if version < self._version:
                raise EngineMismatch(
                    f"the engine's weight version fell from {self._version} to {version} within "
                    "one request"
                )
            self._version_name, self._version = name, version
        return self._version


def _matched(finish: dict[str, Any] | None) -> str | int | None:
    matched = finish.get("matched") if finish is not None else None
    return matched if isinstance(matched, str | int) else None


def _raise_refusal(finish: dict[str, Any]) -> None:
    """Raise the error of a request that SGLang refused after its stream began."""
    status = finish.get("status_code")
    if status is not None:
        raise refusal(status, finish.get("message"))


def _status_of(error: dict[str, Any]) -> int:
    """Return the status of an error in a stream: SGLang's code is one, the embedded's a name."""
    code = error.get("code")
    if isinstance(code, int):
        return code
    return InvalidRequest.status if code == InvalidRequest.default_code else 500


def _top(positions: list[Any], fresh: int) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens without impossible ones, whose logprob SGLang writes as null."""
    top = [
        [(int(entry[1]), float(entry[0])) for entry in position if entry[0] is not None]
        for position in positions
    ]
    if len(top) != fresh:
        raise EngineMismatch("the engine's likeliest tokens do not cover its tokens")
    return top


def _bound(values: list[Any]) -> list[bool]:
    """Return whether the grammar decided each token; TypeError for what says neither."""
    if not all(type(value) is bool for value in values):
        raise TypeError("neither true nor false")
    return values


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Yield the JSON of each server-sent event until `[DONE]`; lines may have any length."""
    rest = bytearray()
    async for block in response.content.iter_any():
        if not rest and block.endswith(b"\n\n") and block.find(b"\n\n") == len(block) - 2:
            # Nearly always a block is one whole event, and is not copied.
            found = [block]
        else:
            at = max(0, len(rest) - 1)
            rest += block
            found = []
            while (end := rest.find(b"\n\n", at)) >= 0:
                found.append(bytes(rest[:end]))
                del rest[: end + 2]
                at = 0
        for event in found:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if data:
                yield orjson.loads(data)
