"""Granted slots on their way from the rank that has one to the rank that needs it."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Literal, TypeAlias

import orjson
from aiohttp import web

from any_agent.access import RUN, Access
from any_agent.errors import AnyAgentError
from router.affinity import key_in
from router.forward import Forwarder
from router.health import Ranks

GRANT = "/grant_capacity"
_PATIENCE = 10.0
"""Seconds with each rank."""
Owner: TypeAlias = Literal["run", "others"]


class Grants:
    """Moves slots of `/grant_capacity` between ranks, one at a time."""

    def __init__(self, ranks: Ranks, forwarder: Forwarder, access: Access) -> None:
        self._ranks = ranks
        self._forwarder = forwarder
        self._access = access
        self.at_rest = asyncio.Lock()
        """Held while a slot is under way: it is at no rank then."""
        self.moved = 0
        """Slots that were brought from one rank to another so far."""

    async def bring(self, request: web.BaseRequest, to: int) -> bool:
        """Bring a slot that the sender of a request may use to a rank; False if no other has one.

        A rank that is away is passed over. A slot is lost only with the router, or if a rank dies
        while it gives it away.
        """
        owner = self._access.caller(key_in(request.headers))
        of: Owner = "run" if owner == RUN else "others"
        async with self.at_rest:
            for rank in self._ranks.live:
                if rank == to or not await self._change(rank, -1, of):
                    continue
                if await self._change(to, 1, of):
                    self.moved += 1
                    return True
                await self._change(rank, 1, of)
                return False
        return False

    async def _change(self, rank: int, change: Literal[-1, 1], of: Owner) -> bool:
        content = orjson.dumps({"change": change, "of": of})
        try:
            async with asyncio.timeout(_PATIENCE):
                answer = await self._forwarder.tell(
                    rank, GRANT, content, self._access.signer.run_key
                )
        except (AnyAgentError, TimeoutError):
            return False
        return answer.status == HTTPStatus.OK
