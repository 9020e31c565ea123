"""One try at bringing new weights to some ranks: pause, open, send, close, check, publish, resume.

What is awaited runs on the event loop of the ranks' clients; the weights themselves are read, and
gathered where they are sharded, in the trainer's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from any_agent.engine.weight_serialization import checksums
from any_agent.errors import AnyAgentError, NotFound, ServiceUnavailable, TrainingError
from any_agent.rollout import RankClients
from trainer.sync.base import (
    RELOAD_SLACK,
    UNREACHABLE_TIMEOUT,
    Bucket,
    EngineCall,
    NewWeights,
    Transport,
)
from trainer.sync.engine_client import EngineClient
from trainer.sync.verify import Sums, WeightVerifier, require_alike

log = logging.getLogger(__name__)
T = TypeVar("T")

_ANSWERS_TIMEOUT = 10.0
_PAUSES_TIMEOUT = 60.0
"""Seconds; calls that cannot be cut are waited for."""


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """What all tries have in common."""

    transport: Transport
    checks: WeightVerifier
    load_timeout: float
    dtype: str
    """Of the tensors that are sent."""
    in_place: bool
    """Calls are kept with their cache."""
    cuda: bool
    """The tensors are on a GPU."""


class UpdateAttempt:
    """One version, one try. Failures are kept, not raised."""

    def __init__(
        self,
        call: EngineCall,
        settings: AttemptSettings,
        ranks: RankClients,
        new: NewWeights,
        *,
        alone: bool,
    ) -> None:
        """``alone``: of one rank, whose refusals are its own, and its last word."""
        self.done: set[int] = set()
        self.refused: dict[int, TrainingError] = {}
        self.why = ""
        """The last failure that another try may mend."""
        self._call = call
        self._s = settings
        self._ranks = ranks
        self._new = new
        self._alone = alone
        self._http = httpx.AsyncClient(timeout=None, trust_env=False)
        self._open: dict[int, EngineClient] = {}
        """Those that are under way."""
        self._left: dict[int, EngineClient] = {}
        """Those that failed."""
        self._between: set[int] = set()
        """Those whose weights are no version's now, or not known to be: they must not sample."""
        self._begun: set[int] = set()
        """Those whose session is this try's; another's may be its successor's."""
        self._expected: dict[int, Sums | None] = {}
        self._sent: dict[str, str] = {}

    def run(self, members: Iterable[int]) -> None:
        """In the trainer's thread."""
        try:
            self._wait(self._find(members))
            self._wait(self._each(self._pause))
            if any(map(self._s.checks.needs_proof, self._open.values())):
                self._new.write()
                self._wait(self._each(self._prove))
            self._wait(self._each(self._open_session))
            self._wait(self._connect())
            self._send()
            self._wait(self._finish())
        finally:
            self._wait(self._leave())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._call(work, timeout=2 * self._s.load_timeout + 10 * UNREACHABLE_TIMEOUT)

    # -- before ----------------------------------------------------------------------------------

    async def _find(self, members: Iterable[int]) -> None:
        """Who is there; nobody is paused for one who is not."""

        async def find(rank: int) -> None:
            async with asyncio.timeout(_ANSWERS_TIMEOUT):
                served = (await self._ranks.clients[rank].run_info()).version
            if served < 0:
                # An attempt before this one has left it so.
                self._between.add(rank)
            entry = self._ranks.entry(rank)
            if entry is None or entry.engine_url is None:
                raise ServiceUnavailable("it has not said where its engine is")
            timeout = self._s.load_timeout
            engine = EngineClient(rank, entry.engine_url, self._http, timeout=timeout)
            await engine.look()
            self._open[rank] = engine

        members = list(members)
        results = await asyncio.gather(*map(find, members), return_exceptions=True)
        for rank, result in zip(members, results, strict=True):
            self._note(rank, result)

    async def _pause(self, engine: EngineClient) -> None:
        async with asyncio.timeout(_PAUSES_TIMEOUT):
            # Ends by itself if this process dies.
            ttl = 2 * self._s.load_timeout + RELOAD_SLACK
            await self._ranks.clients[engine.rank].pause(ttl=ttl)

    async def _prove(self, engine: EngineClient) -> None:
        if self._s.checks.needs_proof(engine):
            self._between.add(engine.rank)
            expected = await self._s.checks.expected(engine, self._new)
            self._expected[engine.rank] = expected

    async def _open_session(self, engine: EngineClient) -> None:
        if not engine.about.embedded:
            # From the first bucket on it has some of these and some of those.
            self._between.add(engine.rank)
            await engine.rename(self._new.loading)
        self._begun.add(engine.rank)
        try:
            await engine.post("/begin_weight_update", {})
        except TrainingError:
            # One is open still, of a trainer that died.
            with suppress(TrainingError):
                await self._close_session(engine)
            await engine.post("/begin_weight_update", {})

    async def _close_session(self, engine: EngineClient) -> None:
        """What came is in then; TrainingError if there is no session, or it is not enough."""
        whole = engine.rank not in self._between
        self._between.add(engine.rank)
        try:
            await engine.post("/end_weight_update", {})
        except TrainingError:
            # The embedded engine keeps what it has, then.
            if whole:
                self._between.discard(engine.rank)
            raise

    async def _connect(self) -> None:
        if self._open:
            engines = list(self._open.values())
            await self._together(self._s.transport.open(engines, cuda=self._s.cuda))

    # -- the weights -----------------------------------------------------------------------------

    def _send(self) -> None:
        if not self._open:
            return
        compares = any(
            e.about.embedded and e.about.dtype == self._s.dtype for e in self._open.values()
        )
        for bucket in self._new.buckets():
            self._wait(self._send_one(bucket, compares=compares))
            if not self._open:
                return

    async def _send_one(self, bucket: Bucket, *, compares: bool) -> None:
        engines = list(self._open.values())
        sending = self._s.transport.send(engines, bucket, self._new.loading)
        summing = asyncio.to_thread(checksums, bucket if compares else [])
        _, sums = await asyncio.gather(self._together(sending), summing)
        self._sent |= sums

    # -- after -----------------------------------------------------------------------------------

    async def _finish(self) -> None:
        sums: dict[int, Sums] = {}

        async def close(engine: EngineClient) -> None:
            await self._close_session(engine)
            expected = self._expected.get(engine.rank)
            sums[engine.rank] = await self._s.checks.require(
                engine, self._sent, expected, self._s.dtype
            )

        async def compare() -> None:
            require_alike(list(self._open.values()), [sums[rank] for rank in self._open])

        await self._each(close)
        await self._together(compare())
        await self._each(self._publish)

    async def _publish(self, engine: EngineClient) -> None:
        version, rank = self._new.version, engine.rank
        if not self._s.in_place:
            # No prefix of other weights may be served. Calls that are kept need theirs.
            await engine.flush()
        await engine.rename(str(version))
        self._between.discard(rank)
        client = self._ranks.clients[rank]
        path, step = str(self._new.folder), self._new.step
        await client.publish_version(version=version, path=path, step=step)
        await client.resume()
        self.done.add(rank)
        del self._open[rank]

    # -- failures --------------------------------------------------------------------------------

    async def _each(self, work: Callable[[EngineClient], Awaitable[None]]) -> None:
        """For all engines at once; those that fail are out."""

        async def bounded(engine: EngineClient) -> None:
            async with asyncio.timeout(self._s.load_timeout):
                await work(engine)

        engines = list(self._open.values())
        results = await asyncio.gather(*map(bounded, engines), return_exceptions=True)
        for engine, result in zip(engines, results, strict=True):
            self._note(engine.rank, result)

    async def _together(self, work: Coroutine[Any, Any, None]) -> None:
        """For all engines as one; if it fails all of them are out."""
        try:
            await work
        except AnyAgentError as error:
            for rank in list(self._open):
                self._note(rank, error)

    def _note(self, rank: int, result: BaseException | None) -> None:
        """Keep a failure that is one; raise what is an error of ours."""
        if result is None:
            return
        if rank in self._open:
            self._left[rank] = self._open.pop(rank)
        refuses = isinstance(result, TrainingError | NotFound)
        if isinstance(result, AnyAgentError) and not (result.retryable or refuses):
            # This trainer was replaced, or is not let in: no other try mends that.
            raise result
        if self._alone and isinstance(result, TrainingError | NotFound):
            self.refused[rank] = TrainingError(result.message)
        elif isinstance(result, AnyAgentError | TimeoutError):
            said = result.message if isinstance(result, AnyAgentError) else "it does not answer"
            log.warning("rank %d has not taken version %d: %s", rank, self._new.version, said)
            self.why = said
        else:
            raise result

    async def _leave(self) -> None:
        """Those that did not take it go on with the weights that they have, if these are whole."""

        async def leave(rank: int, engine: EngineClient) -> None:
            self._s.checks.forget(engine)
            with suppress(AnyAgentError, TimeoutError):
                async with asyncio.timeout(_ANSWERS_TIMEOUT):
                    if rank in self._begun:
                        with suppress(TrainingError):
                            await self._close_session(engine)
                    if rank not in self._between:
                        await self._ranks.clients[rank].resume()

        left = self._left | self._open
        await asyncio.gather(*(leave(rank, engine) for rank, engine in left.items()))
        await self._http.aclose()
