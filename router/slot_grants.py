"""Granted slots on their way from the rank that has one to the rank that needs it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from http import HTTPStatus
from typing import Literal, TypeAlias

import orjson
from aiohttp import web

from any_agent.auth.access import RUN, Access
from any_agent.errors import AnyAgentError, ServiceUnavailable
from router.affinity import key_in
from router.forward import Forwarder
from router.rank_health import RankHealth

log = logging.getLogger(__name__)

GRANT = "/grant_capacity"
_TIMEOUT = 10.0
"""Seconds with each rank."""
_TRIES = 4
"""Times that a change is sent in them, under one idempotency key."""
Owner: TypeAlias = Literal["run", "others"]


class SlotGrants:
    """Moves slots of `/grant_capacity` between ranks, one at a time."""

    def __init__(self, ranks: RankHealth, forwarder: Forwarder, access: Access) -> None:
        self._ranks = ranks
        self._forwarder = forwarder
        self._access = access
        self.at_rest = asyncio.Lock()
        """Held while a slot is under way: it is at no rank then."""
        self.begun = 0
        """How often a slot was looked for so far, to be moved."""
        self.moved = 0
        """Slots that were brought from one rank to another so far."""

    async def bring(self, request: web.BaseRequest, to: int) -> bool:
        """Bring a slot that the sender of a request may use to a rank; False if no other has one.

        A rank that is away is passed over. A slot is never at two ranks. It is lost only with the
        router, or if a rank dies or says nothing for so long while it gives or gets it.
        """
        owner = self._access.caller(key_in(request.headers))
        of: Owner = "run" if owner == RUN else "others"
        async with self.at_rest:
            self.begun += 1
            for rank in self._ranks.live:
                if rank == to or not await self._change(rank, -1, of):
                    continue
                arrived = await self._change(to, 1, of)
                if arrived:
                    self.moved += 1
                elif arrived is None:
                    log.warning("rank %d did not say if a granted slot of rank %d came", to, rank)
                else:
                    await self._change(rank, 1, of)
                return bool(arrived)
        return False

    async def _change(self, rank: int, change: Literal[-1, 1], of: Owner) -> bool | None:
        """Return whether the rank made the change; None if it has not said so, after repeats."""
        content = orjson.dumps({"change": change, "of": of})
        key, once = self._access.signer.run_key, uuid.uuid4().hex
        sent = False
        for _ in range(_TRIES):
            try:
                async with asyncio.timeout(_TIMEOUT / _TRIES):
                    answer = await self._forwarder.tell(rank, GRANT, content, key, once=once)
                return answer.status == HTTPStatus.OK
            except ServiceUnavailable:
                # It is away; an earlier try may have reached it.
                return None if sent else False
            except (AnyAgentError, TimeoutError):
                sent = True
        return None
