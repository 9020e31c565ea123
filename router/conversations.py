"""Where a model call goes that names no session: to the home of its conversation.

What a conversation began with is in every call of it, so each router, and one that was started
again, finds the same rank, where the conversation's session is. With implicit sessions only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from any_agent.access import Scope
from any_agent.config import Config
from any_agent.conversation import rank_of_response, task_of
from any_agent.errors import ServiceUnavailable
from router.affinity import home_of
from router.body import WHOLE, Body, json_object
from router.forward import Forwarder

_CALLS = frozenset(
    prefix + path
    for path in ("/chat/completions", "/completions", "/responses", "/messages")
    for prefix in ("/v1", "")
)
_RESPONSES = ("/v1/responses/", "/responses/")
_MOST_VALUES = 500_000
"""Commas and brackets; ranks refuse a body with more of them, and here it would stop everybody."""
_HELD = 8
"""Long bodies of the largest size that are held at once, to be read here."""


class Conversations:
    """The rule, and what it holds meanwhile."""

    def __init__(self, config: Config, forwarder: Forwarder) -> None:
        server = config.server
        self.on = config.sessions.implicit and server.ranks > 1
        self._ranks = server.ranks
        self._forwarder = forwarder
        self._max_body = server.max_body_bytes
        self._held = 0
        """Bytes."""

    def takes(self, method: str, path: str, scope: Scope) -> bool:
        """Whether a request that names no session is placed here; ADMIN is everybody, where there
        is no key."""
        if not self.on or scope not in (Scope.TENANT, Scope.ADMIN):
            return False
        return path in _CALLS if method == "POST" else path.startswith(_RESPONSES)

    async def place(self, request: web.BaseRequest, path: str, body: Body) -> web.StreamResponse:
        """Pass it on to the rank where its conversation is at home."""
        if request.method != "POST":
            id = path.removeprefix("/v1").split("/")[2]
            return await self._forwarder.pass_on(request, self._of_response(id), body)
        with self._holding(request, body):
            content = await body.whole()
            if len(content) > WHOLE:
                rank = await asyncio.to_thread(self._rank, content)
            else:
                rank = self._rank(content)
            return await self._forwarder.pass_on(request, rank, body, content=content)

    def _rank(self, content: bytes) -> int | None:
        """None for what any rank will refuse."""
        if len(content) > _MOST_VALUES and sum(map(content.count, b",[{")) > _MOST_VALUES:
            return None
        fields = json_object(content)
        if fields is None:
            return None
        named = self._of_response(fields.get("previous_response_id"))
        return named if named is not None else home_of(task_of(fields), self._ranks)

    def _of_response(self, id: Any) -> int | None:
        rank = rank_of_response(id)
        return rank if rank is not None and rank < self._ranks else None

    @contextmanager
    def _holding(self, request: web.BaseRequest, body: Body) -> Iterator[None]:
        """A body of unknown length counts as the longest. ServiceUnavailable beyond the bound."""
        size = 0 if body.short else request.content_length or self._max_body
        if self._held and self._held + size > max(_HELD * self._max_body, WHOLE):
            raise ServiceUnavailable(
                "the router holds as many long requests as it may; try again",
                code="too_many_requests",
                retry_after=2,
            )
        self._held += size
        try:
            yield
        finally:
            self._held -= size
