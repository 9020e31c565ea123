"""Helpers of the tests of the engine's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from any_agent.engine import SGLangEngine
from any_agent.types import GenerationChunk, GenerationHyperparameters, ModelRequest
from tests.support.scripted_engine import ScriptedEngine

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
KINDS = pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
PROMPT = [5, 6, 7]
FORMULA = [20 + (7 * (len(PROMPT) + k)) % 60 for k in range(100)]
"""What the scripted engine says to `PROMPT`."""


@asynccontextmanager
async def client_of(scripted: ScriptedEngine, **options: Any) -> AsyncIterator[SGLangEngine]:
    client = SGLangEngine(scripted.url, decode=scripted.decode, **options)
    try:
        yield client
    finally:
        await client.close()


def request(rid: str = "r", ids: list[int] = PROMPT, **fields: Any) -> ModelRequest:
    values = {"max_new_tokens": 10} | fields
    return ModelRequest(rid, list(ids), GenerationHyperparameters(**values))


async def all_of(
    client: SGLangEngine, request: ModelRequest, *, stream: bool
) -> list[GenerationChunk]:
    return [chunk async for chunk in client.generate(request, stream=stream)]


def joined(chunks: list[GenerationChunk]) -> tuple[list[int], list[float], list[int]]:
    return (
        [i for c in chunks for i in c.output_ids],
        [p for c in chunks for p in c.logprobs],
        [v for c in chunks for v in c.versions],
    )
