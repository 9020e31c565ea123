"""All engines of a run as one: what workflows sample with."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self

from any_agent.engine.base import Capabilities, InferenceEngine, agenerate
from any_agent.engine.kinds import open_engine
from any_agent.engine.model_fingerprint import ModelFingerprint
from any_agent.errors import ConfigError, EngineUnavailable
from any_agent.types import GenerationChunk, ModelRequest, ModelResponse

_REMEMBERED = 65_536
"""Request ids whose engine is known."""


@dataclass(slots=True)
class _Member:
    engine: InferenceEngine
    calls: int = 0
    """Under way."""

    @property
    def away(self) -> bool:
        return bool(getattr(self.engine, "away", False))


class EnginePool:
    """Engines side by side; a call goes to the one with the fewest calls under way.

    Requests with the same ``rid`` go to the same engine, where the cache has what they begin with:
    give the turns of one conversation one ``rid``. Two of them may run at once. One whose engine
    died goes to another.

    ``engines`` are URLs of SGLang's native contract, or engines of this process, which the pool
    then starts and ends if they are context managers. ``decode`` turns token ids into text: stop
    strings across a weight update need it. ``write`` makes of each request the one that is sent,
    with a prompt as token ids; without it a request with a prompt is refused. The rest is
    :func:`open_engine`'s. Enter it on the event loop that calls it, and leave it there.
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
    ) -> None:
        if not engines:
            raise ConfigError("an engine pool needs an engine, or the URL of one")
        if decode is None and any(isinstance(engine, str) for engine in engines):
            raise ConfigError("engines that are reached by URL need decode=tokenizer.decode")
        self._given = tuple(engines)
        self._decode = decode
        self._write = write
        self._shape = shape
        self._kind = kind
        self._update_mode = update_mode
        self._update_wait = update_wait
        self._request_timeout = request_timeout
        self._members: list[_Member] = []
        self._homes: OrderedDict[str, _Member] = OrderedDict()
        self._numbers = itertools.count()
        # Of their own: a call takes a number, too, so of two engines each would be every second's.
        self._turns = itertools.count()
        self._stack = AsyncExitStack()

    # -- its life ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for given in self._given:
                self._members.append(_Member(await self._open(given, stack)))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connections; calls that still run end as EngineUnavailable."""
        self._members = []
        self._homes.clear()
        await self._stack.aclose()

    async def _open(self, given: str | InferenceEngine, stack: AsyncExitStack) -> InferenceEngine:
        if isinstance(given, str):
            assert self._decode is not None
            engine = open_engine(
                self._kind,
                given,
                decode=self._decode,
                update_mode=self._update_mode,
                update_wait=self._update_wait,
                request_timeout=self._request_timeout,
                shape=self._shape,
            )
            stack.push_async_callback(engine.close)
            await engine.require_model()
            return engine
        if isinstance(given, AbstractAsyncContextManager):
            await stack.enter_async_context(given)
        return given

    # -- what it is ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._given)

    @property
    def engines(self) -> tuple[InferenceEngine, ...]:
        """Its engines, once it was entered."""
        return tuple(member.engine for member in self._members)

    @property
    def version(self) -> int:
        """The oldest weight version that an engine samples new tokens with."""
        return min((member.engine.version for member in self._members), default=0)

    def get_version(self) -> int:
        """The same as :attr:`version`."""
        return self.version

    @property
    def calls(self) -> int:
        """Calls under way."""
        return sum(member.calls for member in self._members)

    async def capabilities(self) -> Capabilities:
        """What every engine can do."""
        each = [await member.engine.capabilities() for member in self._entered()]
        return Capabilities(
            **{name: all(getattr(one, name) for one in each) for name in Capabilities.names()}
        )

    async def context_length(self) -> int:
        """Tokens of prompt and output together that every engine takes; ConfigError if unknown."""
        each = []
        for member in self._entered():
            asks = getattr(member.engine, "context_length", None)
            if asks is None:
                raise ConfigError(f"{type(member.engine).__name__} does not say its context length")
            each.append(int(await asks()))
        return min(each)

    # -- calls ---------------------------------------------------------------------------------

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """The whole completion of a request; errors as in :meth:`generate`."""
        return await agenerate(self, self._written(request))

    async def generate(
        self, request: ModelRequest, *, stream: bool = True
    ) -> AsyncGenerator[GenerationChunk]:
        """Sample a completion at one of the engines; see :class:`InferenceEngine`."""
        request = self._written(request)
        member = self._choose(request.rid)
        # An engine refuses two requests of one id at a time; the pool's users need not know.
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
        return request

    def _choose(self, rid: str) -> _Member:
        members = self._entered()
        home = self._homes.get(rid)
        if home is None or (home.away and not all(member.away for member in members)):
            # `min` takes the first of equals: turned, so that they come in turns.
            turn = next(self._turns) % len(members)
            home = min(
                members[turn:] + members[:turn], key=lambda member: (member.away, member.calls)
            )
        self._homes[rid] = home
        self._homes.move_to_end(rid)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return home

    def _entered(self) -> list[_Member]:
        if not self._members:
            raise EngineUnavailable("the engine pool is not open; use `async with pool`")
        return self._members

    # -- weight updates ------------------------------------------------------------------------

    async def hold(self) -> None:
        """Before others update the engines' weights: calls wait, or are cut and wait then.

        What an update cuts goes on with prompt + partial output after :meth:`release`. Engines of
        this process that know nothing of this go on.
        """
        holds = [getattr(engine, "hold", None) for engine in self.engines]
        await asyncio.gather(*(hold() for hold in holds if hold is not None))

    def release(self, version: int | None = None) -> None:
        """Let calls go on under ``version``; None: under what each engine says that it has."""
        for engine in self.engines:
            release = getattr(engine, "release", None)
            if release is not None:
                release(version)

    async def pause(self) -> None:
        """Pause all engines; requests under way are kept and wait."""
        await asyncio.gather(*(engine.pause() for engine in self.engines))

    async def resume(self, version: int) -> None:
        """Go on everywhere, with the weights of ``version``."""
        await asyncio.gather(*(engine.resume(version) for engine in self.engines))
