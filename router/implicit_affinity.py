"""The ranks of model calls that name no session (`sessions.implicit`): their conversations' homes.

Every call of a conversation has its beginning, so each router, also a restarted one, finds the
rank that has the conversation's session.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from any_agent.auth.access import Scope
from any_agent.completions.apis import api_at
from any_agent.config import Config
from any_agent.protocol.conversation_key import rank_of_answer, task_of
from router.affinity import homes_of
from router.body import MAX_SHORT_BYTES, RequestBody, json_object
from router.forward import Forwarder

_RESPONSES = ("/v1/responses/", "/responses/")
_MAX_VALUES = 500_000
"""Commas and brackets in a body: ranks refuse a body with more, and parsing it would block us."""


class ImplicitAffinity:
    """Passes model calls on to the homes of their conversations."""

    def __init__(self, config: Config, forwarder: Forwarder) -> None:
        self._on = config.sessions.implicit
        self._ranks = forwarder.ranks
        self._forwarder = forwarder

    def applies(self, method: str, path: str, scope: Scope) -> bool:
        """Return whether to pass on a request that names no session by its conversation.

        Without keys every caller has the scope ADMIN.
        """
        if (
            not self._on
            or len(self._ranks.fleet.ranks) == 1
            or scope not in (Scope.TENANT, Scope.ADMIN)
        ):
            return False
        if method != "POST":
            return path.startswith(_RESPONSES)
        api = api_at(path)
        return api is not None and api.by_policy

    async def pass_on(
        self, request: web.BaseRequest, path: str, body: RequestBody
    ) -> web.StreamResponse:
        """Pass a request on to the home of its conversation."""
        if request.method != "POST":
            id = path.removeprefix("/v1").split("/")[2]
            return await self._forwarder.pass_on(request, self.rank_of_answer(id), body)
        content = await body.read()
        if len(content) > MAX_SHORT_BYTES:
            parsing = asyncio.get_running_loop().run_in_executor(None, self.name, path, content)
            try:
                name = await asyncio.shield(parsing)
            except asyncio.CancelledError:
                # The body stays in memory, and counts, until its thread has ended.
                await asyncio.wait([parsing])
                raise
        else:
            name = self.name(path, content)
        if not isinstance(name, str):
            return await self._forwarder.pass_on(request, name, body, content=content)
        return await self._forwarder.pass_to_homes(
            request, lambda: homes_of(name, self._ranks.fleet), body, content
        )

    def name(self, path: str, content: bytes) -> str | int | None:
        """Return the name of a call's conversation, or the rank of the response that it continues;
        None for a body that any rank will refuse."""
        if len(content) > _MAX_VALUES and sum(map(content.count, b",[{")) > _MAX_VALUES:
            return None
        fields = json_object(content)
        if fields is None:
            return None
        named = self.rank_of_answer(fields.get("previous_response_id"))
        if named is not None:
            return named
        api = api_at(path)
        conversation = fields if api is None else api.conversation(fields)
        return task_of(conversation)

    def rank_of_answer(self, id: Any) -> int | None:
        """Return the rank of this service that issued an answer's id; None for any other id."""
        rank = rank_of_answer(id)
        return rank if rank is not None and self._ranks.fleet.state(rank) is not None else None
