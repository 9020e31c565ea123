"""`RankClients`: one client for each rank of the fleet, at the address in its registry entry;
`AckSender`: acknowledges sessions to the ranks that they live on."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
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
from any_agent.rundir.fleet import Fleet, FleetFile
from any_agent.rundir.registry import EntryStore, Registry, RegistryEntry, rank_name

log = logging.getLogger(__name__)
T = TypeVar("T")

RANK_ENDED = "rank_ended"
"""The code of the error of a call to a rank that has left the fleet."""
_RETRY_DELAY = 0.1
POLL_INTERVAL = 0.2  # seconds between two reads of the registry's folder, for any number of calls


class RankClients:
    """One client per rank of the fleet; each attempt of a call reads its rank's URL anew.

    Each call waits up to ``retry_for`` seconds for a rank that is away. Use it on one event
    loop, and ``close`` it.
    """

    def __init__(
        self,
        folder: Path,
        fleet: FleetFile,
        *,
        admin_key: str | Callable[[], str] | None = None,
        epoch: int | None = None,
        retry_for: float = 30.0,
        also: EntryStore | None = None,
    ) -> None:
        self._registry = Registry(folder, also)
        self._fleet = fleet
        self._read_at = -POLL_INTERVAL
        self._make = partial(
            RLClient, admin_key=admin_key, epoch=epoch, retry_for=retry_for, trust_env=False
        )
        self.clients: dict[int, RLClient] = {}
        """The clients by rank, those of ranks that have ended included: calls may be under way."""
        fleet.refresh()
        self._add_missing()

    def __len__(self) -> int:
        return len(self.present)

    @property
    def fleet(self) -> Fleet:
        return self._fleet.now

    @property
    def present(self) -> list[int]:
        """The ranks of the fleet. One that joins is among them once its proxy is up."""
        return [rank for rank in self.fleet.ranks if rank in self.clients]

    @property
    def sampling(self) -> list[int]:
        """The ranks that have an engine: all but those that are drained."""
        return [rank for rank in self.present if self.fleet.state(rank) != "drained"]

    @property
    def joining(self) -> list[int]:
        """The ranks that have an engine and do not serve agents yet."""
        return [rank for rank in self.sampling if self.fleet.state(rank) == "joining"]

    def follow(self) -> None:
        """Read the fleet again, and add a client for each new rank."""
        self._read()
        self._add_missing()

    def _add_missing(self) -> None:
        for rank in self.fleet.ranks:
            up = self.fleet.state(rank) != "joining" or self._registry.alive(rank_name(rank))
            if up and rank not in self.clients:
                self.clients[rank] = self._make(partial(self._url, rank))

    def entry(self, rank: int) -> RegistryEntry | None:
        """Return a rank's newest registry entry; None before its first one."""
        self._read()
        return self._registry.get(rank_name(rank))

    def _read(self) -> None:
        now = time.monotonic()
        if now - self._read_at >= POLL_INTERVAL:
            self._read_at = now
            self._fleet.refresh()
            self._registry.refresh()

    def ended(self, rank: int) -> bool:
        """Return whether a rank was in the fleet and has left it, with nothing left to do."""
        return self.fleet.state(rank) is None and (self.fleet.knew(rank) or rank in self.clients)

    def home(self, session_id: str) -> int:
        """Return the rank that a session lives or lived on; NotFound for another run's."""
        rank = rank_of_session(session_id)
        if rank is None or not (self.fleet.state(rank) or self.ended(rank)):
            raise NotFound(f"no rank of this run has had the session {session_id[:80]!r}")
        return rank

    async def all(
        self, call: Callable[[int], Awaitable[T]], ranks: Sequence[int] | None = None
    ) -> list[T]:
        """Call these ranks at once, or every one; all calls end before the first failure is raised.

        The failure of a rank that has left the fleet meanwhile is none.
        """
        called = self.present if ranks is None else ranks
        calls = {rank: asyncio.ensure_future(call(rank)) for rank in called}
        await asyncio.gather(*calls.values(), return_exceptions=True)
        gone = {rank for rank, ended in calls.items() if ended.exception() and self.ended(rank)}
        return [ended.result() for rank, ended in calls.items() if rank not in gone]

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()
        await asyncio.to_thread(self._registry.close)

    def _url(self, rank: int) -> str | None:
        entry = self.entry(rank)
        if self.ended(rank):
            raise NotFound(f"rank {rank} was drained and has ended", code=RANK_ENDED)
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
        self._queues: defaultdict[int, asyncio.Queue[_PendingAck]] = defaultdict(asyncio.Queue)
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
        for rank in sorted({*map(home, trained), *(home(r.session_id) for r in rejected)}):
            mine = [id for id in trained if home(id) == rank]
            refused = [r for r in rejected if home(r.session_id) == rank]
            if self._ranks.ended(rank):
                # It had nothing left to do, so it has had this acknowledgement already.
                self._settled([*mine, *(r.session_id for r in refused)])
                continue
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
        client = self._ranks.clients[rank]
        while True:
            ack = await self._queues[rank].get()
            await self._send(client, ack)
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
                if error.code == RANK_ENDED:
                    # It ends once a trainer has left it nothing to do: it has had this.
                    return
                if not error.retryable:
                    raise
                if error.message != said:
                    log.warning(
                        "cannot acknowledge sessions, and will try again: %s", error.message
                    )
                said = error.message
            await backoff.wait()
