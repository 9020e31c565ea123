"""All engines of a run as one engine for workflows."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

from any_agent.engine.base import (
    Capabilities,
    InferenceEngine,
    RemoteEngine,
    adapter_names,
    agenerate,
)
from any_agent.engine.kinds import open_engine
from any_agent.engine.model_fingerprint import ModelFingerprint
from any_agent.errors import ConfigError, EngineUnavailable
from any_agent.types import GenerationChunk, ModelRequest, ModelResponse

SEEDS: ContextVar[Callable[[int | None], int | None]] = ContextVar(
    "any_agent_engine_seeds", default=lambda own: own
)
"""Gives each call of a task its seed, from the one that the call has itself."""
MAX_REMEMBERED = 65_536  # request ids whose engine is remembered


@dataclass(slots=True)
class _Member:
    engine: InferenceEngine
    calls: int = 0

    @property
    def away(self) -> bool:
        return bool(getattr(self.engine, "away", False))


class EnginePool:
    """Engines side by side; a call goes to the one with the fewest running calls.

    Requests with the same ``rid`` go to the same engine, whose cache has their common beginning:
    use one ``rid`` for the turns of a conversation. Two of them may run at once. If the engine
    died, they go to another one.

    ``engines`` are URLs of SGLang's native contract, or engines of this process, which the pool
    starts and ends if they are context managers. ``decode`` turns token ids into text: stop
    strings across a weight update need it. ``write`` returns the request to send, with a prompt as
    token ids; without it a request with a prompt in another form is refused. The other arguments
    are those of :func:`open_engine`. Enter and leave the pool on the event loop that calls it.
    """

    def __init__(
        self,
        engines: Sequence[str | InferenceEngine],
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        write: Callable[[ModelRequest], ModelRequest] | None = None,
        shape: ModelFingerprint | None = None,
        kind: str = "sglang",
        update_mode: Literal["resume", "in_place"] = "resume",
        update_wait: float = 120.0,
        request_timeout: float = 600.0,
        key: str | None = None,
    ) -> None:
        if not engines:
            raise ConfigError("an engine pool needs at least one engine or URL")
        if decode is None and any(isinstance(engine, str) for engine in engines):
            raise ConfigError("engines that are reached by URL need decode=tokenizer.decode")
        self._given = tuple(engines)
        self._write = write
        self._connect: Callable[[str], RemoteEngine] = partial(
            open_engine,
            kind,
            decode=decode or _no_decode,
            shape=shape,
            update_mode=update_mode,
            update_wait=update_wait,
            request_timeout=request_timeout,
            key=key,
        )
        self._members: list[_Member] = []
        self._homes: OrderedDict[str, _Member] = OrderedDict()
        self._numbers = itertools.count()
        # Not the same counter: calls take numbers, too, so two engines would not take turns.
        self._turns = itertools.count()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for given in self._given:
                self._members.append(_Member(await self._open(given, stack)))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls that still run end as EngineUnavailable."""
        self._members = []
        self._homes.clear()
        await self._stack.aclose()

    async def _open(self, given: str | InferenceEngine, stack: AsyncExitStack) -> InferenceEngine:
        if isinstance(given, str):
            engine = self._connect(given)
            stack.push_async_callback(engine.close)
            await engine.require_model()
            return engine
        if isinstance(given, AbstractAsyncContextManager):
            await stack.enter_async_context(given)
        return given

    def __len__(self) -> int:
        return len(self._given)

    @property
    def engines(self) -> tuple[InferenceEngine, ...]:
        """The engines of an entered pool."""
        return tuple(member.engine for member in self._members)

    @property
    def version(self) -> int:
        """The oldest weight version with which an engine samples new tokens."""
        return min((member.engine.version for member in self._members), default=0)

    def get_version(self) -> int:
        """Return :attr:`version`."""
        return self.version

    @property
    def calls(self) -> int:
        """The number of running calls."""
        return sum(member.calls for member in self._members)

    async def capabilities(self) -> Capabilities:
        """Return the features that every engine has."""
        each = [await member.engine.capabilities() for member in self._entered()]
        return Capabilities(
            **{name: all(getattr(one, name) for one in each) for name in Capabilities.names()}
        )

    async def context_length(self) -> int:
        """Return how many tokens, prompt and output, every engine takes; ConfigError if unknown."""
        each = []
        for member in self._entered():
            read = getattr(member.engine, "context_length", None)
            if read is None:
                kind = type(member.engine).__name__
                raise ConfigError(f"{kind} has no method context_length: add one to the engine")
            each.append(int(await read()))
        return min(each)

    async def adapter_names(self) -> frozenset[str]:
        """Return the names of the adapters that every engine has."""
        each = [await adapter_names(member.engine) for member in self._entered()]
        return frozenset.intersection(*each)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Return the completion of a request; raises as :meth:`generate`."""
        return await agenerate(self, self._written(request))

    async def generate(
        self, request: ModelRequest, *, stream: bool = True
    ) -> AsyncGenerator[GenerationChunk]:
        """Sample a completion at one of the engines; see :class:`InferenceEngine`."""
        request = self._written(request)
        member = self._choose(request.rid)
        # A unique id, because an engine refuses two simultaneous requests of one id.
        own = replace(request, rid=f"{request.rid}.{next(self._numbers)}")
        member.calls += 1
        try:
            async with aclosing(member.engine.generate(own, stream=stream)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            member.calls -= 1

    def _written(self, request: ModelRequest) -> ModelRequest:
        if self._write is not None:
            request = self._write(request)
        request.require_ids()
        seed = SEEDS.get()(request.gconfig.seed)
        if seed != request.gconfig.seed:
            request = replace(request, gconfig=request.gconfig.new(seed=seed))
        return request

    def _choose(self, rid: str) -> _Member:
        members = self._entered()
        home = self._homes.get(rid)
        if home is None or (home.away and not all(member.away for member in members)):
            # `min` takes the first of equals: rotated, so that engines take turns.
            turn = next(self._turns) % len(members)
            home = min(
                members[turn:] + members[:turn], key=lambda member: (member.away, member.calls)
            )
        self._homes[rid] = home
        self._homes.move_to_end(rid)
        if len(self._homes) > MAX_REMEMBERED:
            self._homes.popitem(last=False)
        return home

    def _entered(self) -> list[_Member]:
        if not self._members:
            raise EngineUnavailable("the engine pool is not open; use `async with pool`")
        return self._members

    async def hold(self) -> None:
        """Make calls wait while another process updates the engines' weights.

        A call that the update cuts continues with prompt + partial output after :meth:`release`.
        Engines of this process without such a method are not affected.
        """
        holds = [getattr(engine, "hold", None) for engine in self.engines]
        await asyncio.gather(*(hold() for hold in holds if hold is not None))

    def release(self, version: int | None = None) -> None:
        """Let calls continue under ``version``; None: under the version each engine reports."""
        for engine in self.engines:
            release = getattr(engine, "release", None)
            if release is not None:
                release(version)

    async def pause(self) -> None:
        """Pause all engines; running requests are kept and wait."""
        await asyncio.gather(*(engine.pause() for engine in self.engines))

    async def resume(self, version: int) -> None:
        """Continue on all engines, with the weights of ``version``."""
        await asyncio.gather(*(engine.resume(version) for engine in self.engines))


def _no_decode(ids: Sequence[int]) -> str:
    raise AssertionError("only engines that are reached by URL decode")
