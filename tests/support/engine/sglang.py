"""Helpers of the tests of the engine's client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from any_agent.engine import SGLangEngine
from any_agent.types import GenerationChunk, GenerationHyperparameters, ModelRequest
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until

PROMPT = [5, 6, 7]
FORMULA = [20 + (7 * (len(PROMPT) + k)) % 60 for k in range(100)]
"""What the scripted engine says to `PROMPT`."""


Work: TypeAlias = asyncio.Task[list[GenerationChunk]]


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


def ask(client: SGLangEngine, asked: ModelRequest, *, stream: bool) -> Work:
    return asyncio.create_task(all_of(client, asked, stream=stream))


async def at_token(scripted: ScriptedEngine, at: int, *works: Work) -> None:
    """Until the engine holds every generation at a token."""
    runs = scripted.running
    await until(lambda: len(runs) == len(works) and all(len(r.ids) == at for r in runs.values()))
    assert not any(work.done() for work in works)


async def held(
    client: SGLangEngine,
    scripted: ScriptedEngine,
    at: int,
    asked: ModelRequest | None = None,
    *,
    stream: bool = True,
) -> Work:
    """A call that the engine holds at a token until it is told otherwise."""
    scripted.hold(at)
    work = ask(client, asked or request(), stream=stream)
    await at_token(scripted, at, work)
    return work


async def update(client: SGLangEngine, scripted: ScriptedEngine, version: int) -> None:
    """New weights come to the engine, as the client is told."""
    await client.pause()
    scripted.weight_version = str(version)
    await client.resume(version)
