"""A script's engine as :class:`any_agent.engine.InferenceEngine`, for callers on any event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Protocol, TypeVar

from any_agent.engine import Capabilities, EnginePool
from any_agent.types import GenerationChunk, ModelRequest

T = TypeVar("T")


class _WrappedEngine(Protocol):
    context_length: int

    @property
    def version(self) -> int: ...

    def agenerate_stream(self, request: ModelRequest) -> AsyncGenerator[GenerationChunk]: ...

    async def ask(self, ask: Callable[[EnginePool], Coroutine[object, object, T]]) -> T: ...


class CrossLoopEngine:
    """Token ids in, chunks of token ids out, as recording clients take them."""

    def __init__(self, engine: _WrappedEngine) -> None:
        self._engine = engine

    @property
    def version(self) -> int:
        return self._engine.version

    def generate(self, request: ModelRequest, *, stream: bool) -> AsyncGenerator[GenerationChunk]:
        return self._engine.agenerate_stream(request)

    async def capabilities(self) -> Capabilities:
        return await self._engine.ask(lambda pool: pool.capabilities())

    async def context_length(self) -> int:
        return self._engine.context_length

    async def pause(self) -> None:
        await self._engine.ask(lambda pool: pool.pause())

    async def resume(self, version: int) -> None:
        await self._engine.ask(lambda pool: pool.resume(version))
