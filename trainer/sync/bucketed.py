"""Weights sent to engines bucket by bucket: pause, open, send, close, check, publish, resume.

Coroutines run on the event loop of the ranks' clients; the weights themselves are read, and
gathered where they are sharded, in the trainer's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from any_agent.engine.weight_serialization import checksums
from any_agent.errors import AnyAgentError, NotFound, TrainingError
from any_agent.rollout import RankClients
from trainer.sync import base
from trainer.sync.base import NewWeights, UpdateDeadline, WeightSync, engine_url
from trainer.sync.engine_client import (
    EngineClient,
    Sums,
    WeightVerifier,
    control_session,
    require_alike,
)
from trainer.sync.transports import Transport
from trainer.weight_buckets import Bucket

log = logging.getLogger(__name__)

_MAX_JOINT_TRIES = 2  # tries with all engines at once
_REPLY_TIMEOUT = 10.0
_PAUSE_TIMEOUT = 60.0  # seconds that a pause may take: it waits for calls that cannot be cut


@dataclass(eq=False, kw_only=True)
class BucketSync(WeightSync):
    """A weight sync over a transport.

    All engines that answer get each bucket at once; if one dies meanwhile, the others get all
    buckets once more. If that fails too, each engine is tried by itself, so that a broken one does
    not delay the rest. An engine's weights have no version until it verifiably has all of them;
    until then it stays paused, unless it still has the old ones complete, as the embedded engine.
    """

    transport: Transport = field(kw_only=False)
    dtype: str
    """The type of the tensors that are sent."""
    verifier: WeightVerifier = field(default_factory=WeightVerifier)

    def close(self) -> None:
        self.transport.drop()

    def _bring(self, ranks: RankClients, wanted: Collection[int], new: NewWeights) -> None:
        pending = list(wanted)
        refused: list[TrainingError] = []
        deadline = UpdateDeadline(self.load_timeout)
        tries = 0
        while pending:
            together, why = tries < _MAX_JOINT_TRIES, ""
            tries += 1
            for members in [pending] if together else [[rank] for rank in pending]:
                attempt = UpdateAttempt(self, ranks, new, alone=not together)
                attempt.run(members)
                refused += attempt.refused.values()
                gone = attempt.done | attempt.refused.keys()
                pending = [r for r in pending if r not in gone and r in ranks.sampling]
                why = attempt.why or why
            if not pending:
                break
            deadline.require_time(f"ranks {', '.join(map(str, pending))}", new.version, why)
            time.sleep(base.RETRY_DELAY)
        if refused:
            raise refused[0]


class UpdateAttempt:
    """One try to give some ranks one version. Failures are stored, not raised."""

    def __init__(
        self, sync: BucketSync, ranks: RankClients, new: NewWeights, *, alone: bool
    ) -> None:
        """``alone``: a try of one rank, whose refusal is its own and final."""
        self.done: set[int] = set()
        self.refused: dict[int, TrainingError] = {}
        self.why = ""
        """The last failure that another try may overcome."""
        self._sync = sync
        self._ranks = ranks
        self._new = new
        self._alone = alone
        self._http: aiohttp.ClientSession | None = None
        self._open: dict[int, EngineClient] = {}
        """The engines that take part."""
        self._failed: dict[int, EngineClient] = {}
        """The engines that failed."""
        self._between: set[int] = set()
        """Ranks whose weights may belong to no version: they must not sample."""
        self._opened: set[int] = set()
        """Ranks whose session this try opened; any other may be a successor's."""
        self._expected: dict[int, Sums | None] = {}
        self._sent: dict[str, str] = {}

    def run(self, members: Iterable[int]) -> None:
        """Make the try, in the trainer's thread."""
        wait = self._sync.wait
        try:
            wait(self._find(members))
            wait(self._each(self._pause))
            if any(map(self._sync.verifier.needs_proof, self._open.values())):
                self._new.write()
                wait(self._each(self._prove))
            wait(self._each(self._open_session))
            wait(self._connect())
            self._send()
            wait(self._finish())
        finally:
            wait(self._leave())

    # -- before ----------------------------------------------------------------------------------

    async def _find(self, members: Iterable[int]) -> None:
        """Find the engines that answer; none is paused for one that does not."""
        http = self._http = control_session(self._sync.key)

        async def find(rank: int) -> None:
            async with asyncio.timeout(_REPLY_TIMEOUT):
                served = (await self._ranks.clients[rank].run_info()).version
            if served < 0:
                # An earlier attempt has left it half loaded.
                self._between.add(rank)
            url = engine_url(self._ranks, rank)
            engine = EngineClient(rank, url, http, timeout=self._sync.load_timeout)
            await engine.fetch_info()
            self._open[rank] = engine

        members = list(members)
        results = await asyncio.gather(*map(find, members), return_exceptions=True)
        for rank, result in zip(members, results, strict=True):
            self._note(rank, result)

    async def _pause(self, engine: EngineClient) -> None:
        async with asyncio.timeout(_PAUSE_TIMEOUT):
            await self._sync.pause(self._ranks, engine.rank)

    async def _prove(self, engine: EngineClient) -> None:
        if self._sync.verifier.needs_proof(engine):
            self._between.add(engine.rank)
            self._expected[engine.rank] = await self._sync.verifier.expected(engine, self._new)

    async def _open_session(self, engine: EngineClient) -> None:
        if not engine.info.embedded:
            # From the first bucket on it has weights of two versions.
            self._between.add(engine.rank)
            await engine.rename(self._new.loading)
        self._opened.add(engine.rank)
        try:
            await engine.post("/begin_weight_update", {})
        except TrainingError:
            # A trainer that died has left one open.
            with suppress(TrainingError):
                await self._close_session(engine)
            await engine.post("/begin_weight_update", {})

    async def _close_session(self, engine: EngineClient) -> None:
        """Let the engine use what it received; TrainingError if it refuses."""
        complete = engine.rank not in self._between
        self._between.add(engine.rank)
        try:
            await engine.post("/end_weight_update", {})
        except TrainingError:
            # The embedded engine keeps its old weights then.
            if complete:
                self._between.discard(engine.rank)
            raise

    async def _connect(self) -> None:
        if self._open:
            engines = list(self._open.values())
            await self._together(self._sync.transport.open(engines))

    # -- the weights -----------------------------------------------------------------------------

    def _send(self) -> None:
        if not self._open:
            return
        compares = any(
            e.info.embedded and e.info.dtype == self._sync.dtype for e in self._open.values()
        )
        for bucket in self._new.buckets():
            self._sync.wait(self._send_one(bucket, compares=compares))
            if not self._open:
                return

    async def _send_one(self, bucket: Bucket, *, compares: bool) -> None:
        engines = list(self._open.values())
        sending = self._sync.transport.send(engines, bucket, self._new.loading)
        summing = asyncio.to_thread(checksums, bucket if compares else [])
        _, sums = await asyncio.gather(self._together(sending), summing)
        self._sent |= sums

    # -- after -----------------------------------------------------------------------------------

    async def _finish(self) -> None:
        sums: dict[int, Sums] = {}

        async def close(engine: EngineClient) -> None:
            await self._close_session(engine)
            expected = self._expected.get(engine.rank)
            sums[engine.rank] = await self._sync.verifier.require(
                engine, self._sent, expected, self._sync.dtype
            )

        async def compare() -> None:
            require_alike(list(self._open.values()), [sums[rank] for rank in self._open])

        await self._each(close)
        await self._together(compare())
        await self._each(self._publish)

    async def _publish(self, engine: EngineClient) -> None:
        rank = engine.rank
        if not self._sync.in_place:
            # No prefix of other weights may be reused; calls that are kept need theirs.
            await engine.flush()
        await engine.rename(str(self._new.version))
        self._between.discard(rank)
        await self._sync.publish(self._ranks, rank, self._new)
        await self._ranks.clients[rank].resume()
        self.done.add(rank)
        del self._open[rank]

    # -- failures --------------------------------------------------------------------------------

    async def _each(self, work: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Do this for all engines at once, and remove those that fail."""

        async def bounded(engine: EngineClient) -> None:
            async with asyncio.timeout(self._sync.load_timeout):
                await work(engine)

        engines = list(self._open.values())
        results = await asyncio.gather(*map(bounded, engines), return_exceptions=True)
        for engine, result in zip(engines, results, strict=True):
            self._note(engine.rank, result)

    async def _together(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this for all engines as one; if it fails, remove all of them."""
        try:
            await work
        except AnyAgentError as error:
            for rank in list(self._open):
                self._note(rank, error)

    def _note(self, rank: int, result: BaseException | None) -> None:
        """Store an engine's failure; raise any other error."""
        if result is None:
            return
        if rank in self._open:
            self._failed[rank] = self._open.pop(rank)
        refuses = isinstance(result, TrainingError | NotFound)
        if isinstance(result, AnyAgentError) and not (result.retryable or refuses):
            # This trainer was replaced, or its key refused: another try would not help.
            raise result
        if self._alone and refuses:
            self.refused[rank] = TrainingError(getattr(result, "message", ""))
        elif isinstance(result, AnyAgentError | TimeoutError):
            self.why = getattr(result, "message", "it does not answer")
            log.warning("rank %d has not taken version %d: %s", rank, self._new.version, self.why)
        else:
            raise result

    async def _leave(self) -> None:
        """Let the engines that failed continue with their old weights, if these are complete."""

        async def leave(rank: int, engine: EngineClient) -> None:
            self._sync.verifier.forget(engine)
            with suppress(AnyAgentError, TimeoutError):
                async with asyncio.timeout(_REPLY_TIMEOUT):
                    if rank in self._opened:
                        with suppress(TrainingError):
                            await self._close_session(engine)
                    if rank not in self._between:
                        await self._ranks.clients[rank].resume()

        remaining = self._failed | self._open
        await asyncio.gather(*(leave(rank, engine) for rank, engine in remaining.items()))
        if self._http is not None:
            await self._http.close()
