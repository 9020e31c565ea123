"""`AckSender`: acknowledges sessions to the ranks that they live on."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from any_agent.client.backoff import Backoff
from any_agent.client.rl_client import RLClient
from any_agent.errors import AnyAgentError, Conflict, NotFound
from any_agent.protocol.training import Rejection
from any_agent.rollout.rank_clients import RankClients

log = logging.getLogger(__name__)


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
        while True:
            try:
                await client.ack(owner=self._owner, trained=trained, rejected=rejected, step=step)
                return
            except AnyAgentError as error:
                if not error.retryable:
                    raise
                log.warning("cannot acknowledge sessions, and will try again: %s", error.message)
            await backoff.wait()
