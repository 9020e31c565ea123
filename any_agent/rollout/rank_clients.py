"""`RankClients`: one client for each rank of a run, at the address in its registry entry;
`AckSender`: acknowledges sessions to the ranks that they live on."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from any_agent.client.backoff import Backoff
from any_agent.client.rl_client import RLClient
from any_agent.errors import AnyAgentError, Conflict, NotFound, ServiceUnavailable
from any_agent.keys import rank_of_session
from any_agent.protocol.training import Rejection
from any_agent.rundir.registry import Registry, RegistryEntry, rank_name

log = logging.getLogger(__name__)
T = TypeVar("T")

_RETRY_DELAY = 0.1
_POLL_INTERVAL = 0.2  # seconds between two reads of the registry's folder, for any number of calls


class RankClients:
    """One client per rank; each attempt of a call reads its rank's URL anew.

    Each call waits up to ``retry_for`` seconds for a rank that is away. Use it on one event
    loop, and ``close`` it.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        admin_key: str | Callable[[], str] | None = None,
        epoch: int | None = None,
        retry_for: float = 30.0,
    ) -> None:
        self._registry = Registry(folder)
        self._polled_at = -_POLL_INTERVAL
        self.clients: tuple[RLClient, ...] = tuple(
            RLClient(
                partial(self._url, rank),
                admin_key=admin_key,
                epoch=epoch,
                retry_for=retry_for,
                trust_env=False,
            )
            for rank in range(count)
        )

    def __len__(self) -> int:
        return len(self.clients)

    def entry(self, rank: int) -> RegistryEntry | None:
        """Return a rank's newest registry entry; None before its first one."""
        now = time.monotonic()
        if now - self._polled_at >= _POLL_INTERVAL:
            self._polled_at = now
            self._registry.refresh()
        return self._registry.get(rank_name(rank))

    def home(self, session_id: str) -> int:
        """Return the rank that a session lives on; NotFound if the run has no such rank."""
        rank = rank_of_session(session_id)
        if rank is None or rank >= len(self):
            raise NotFound(
                f"none of the {len(self)} ranks has the session {session_id[:80]!r}: continue a "
                "trial with as many ranks (server.ranks) as before"
            )
        return rank

    async def all(self, call: Callable[[int], Awaitable[T]]) -> list[T]:
        """Call every rank at once; all calls end before the first failure is raised."""
        calls = [asyncio.ensure_future(call(rank)) for rank in range(len(self))]
        await asyncio.gather(*calls, return_exceptions=True)
        return [ended.result() for ended in calls]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()

    def _url(self, rank: int) -> str | None:
        entry = self.entry(rank)
        return entry.url if entry is not None else None


def engine_urls(folder: Path, count: int, *, within: float = 60.0) -> list[str]:
    """Return the URL of each rank's engine from the registry; block until all are known.

    Raises ServiceUnavailable if a rank has not registered it ``within`` seconds.
    """
    registry = Registry(folder)
    deadline = time.monotonic() + within
    while True:
        registry.refresh()
        entries = [registry.get(rank_name(rank)) for rank in range(count)]
        urls = [entry.engine_url for entry in entries if entry is not None and entry.engine_url]
        if len(urls) == count:
            return urls
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"{count - len(urls)} of {count} ranks have not registered their engine within "
                f"{within:g} s: check that they run; their entries are in {folder}"
            )
        time.sleep(_RETRY_DELAY)


@dataclass(slots=True, eq=False)
class _PendingAck:
    """One rank's part of one batch's acknowledgement."""

    trained: list[str]
    rejected: list[Rejection]
    step: int | None
    done: asyncio.Future[None]


class AckSender:
    """Acknowledges to each rank the use of its sessions, and retries until the rank has replied.

    A rank that is away delays neither the others nor the caller; the sessions of its pending
    acknowledgements stay buffered on it, so their number is bounded.
    """

    def __init__(
        self, ranks: RankClients, *, owner: str, settled: Callable[[list[str]], None]
    ) -> None:
        """``settled`` is called with the sessions that a rank has released."""
        self._ranks = ranks
        self._owner = owner
        self._settled = settled
        self._queues: list[asyncio.Queue[_PendingAck]] = [asyncio.Queue() for _ in ranks.clients]
        self._last: dict[int, asyncio.Future[None]] = {}
        """Each rank's newest acknowledgement."""

    async def send(
        self,
        trained: Sequence[str],
        rejected: Sequence[Rejection],
        *,
        patience: float,
        step: int | None = None,
    ) -> None:
        """Return when every rank has replied, or after ``patience`` seconds at the latest.

        ``step`` is the optimizer step that consumed them, if one did.
        """
        home = self._ranks.home
        sent = []
        for rank in range(len(self._ranks)):
            mine = [id for id in trained if home(id) == rank]
            refused = [r for r in rejected if home(r.session_id) == rank]
            if mine or refused:
                ack = _PendingAck(mine, refused, step, asyncio.get_running_loop().create_future())
                self._queues[rank].put_nowait(ack)
                self._last[rank] = ack.done
                sent.append(ack.done)
        await self._wait(sent, patience)

    async def flush(self, *, patience: float) -> None:
        """Wait in the same way for all acknowledgements that were sent before."""
        await self._wait(list(self._last.values()), patience)

    async def _wait(self, sent: list[asyncio.Future[None]], patience: float) -> None:
        late = (await asyncio.wait(sent, timeout=patience))[1] if sent else ()
        if late:
            log.warning(
                "%d ranks have not replied to an acknowledgement within %g s; it is repeated until "
                "they reply",
                len(late),
                patience,
            )

    async def run(self, rank: int) -> None:
        """Send one rank's acknowledgements in order, until cancelled."""
        while True:
            ack = await self._queues[rank].get()
            await self._send(self._ranks.clients[rank], ack)
            self._settled([*ack.trained, *(r.session_id for r in ack.rejected)])
            ack.done.set_result(None)

    async def _send(self, client: RLClient, ack: _PendingAck) -> None:
        trained, rejected = ack.trained, ack.rejected
        try:
            await self._repeat(client, trained, rejected, ack.step)
        except (Conflict, NotFound):
            # Some leases were lost (to another trainer, or in a very long step); the other sessions
            # must not wait for their time-out.
            for one in [*(([id], []) for id in trained), *(([], [r]) for r in rejected)]:
                try:
                    await self._repeat(client, *one, ack.step)
                except (Conflict, NotFound) as error:
                    log.error("a session may be leased and trained on again: %s", error.message)

    async def _repeat(
        self, client: RLClient, trained: list[str], rejected: list[Rejection], step: int | None
    ) -> None:
        """Send an acknowledgement until the rank replies, which applies it entirely or not at all.

        Repeating it changes nothing, so that a full store, for example, ends no run.
        """
        backoff = Backoff(math.inf, first=0.25, longest=5.0)
        said = ""
        while True:
            try:
                await client.ack(owner=self._owner, trained=trained, rejected=rejected, step=step)
                return
            except AnyAgentError as error:
                if not error.retryable:
                    raise
                if error.message != said:
                    log.warning(
                        "cannot acknowledge sessions, and will try again: %s", error.message
                    )
                said = error.message
            await backoff.wait()
