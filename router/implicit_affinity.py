"""The ranks of model calls that name no session (`sessions.implicit`): their conversations' homes.

Every call of a conversation has its beginning, so each router, also a restarted one, finds the
rank that has the conversation's session.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from typing import Any

from aiohttp import web

from any_agent.auth.access import Scope
from any_agent.completions.apis import api_at
from any_agent.config import Config
from any_agent.errors import ServiceUnavailable
from any_agent.protocol.conversation_key import rank_of_response, task_of
from router.affinity import home_of, key_in
from router.body import MAX_SHORT_BYTES, RequestBody, json_object
from router.forward import Forwarder

_RESPONSES = ("/v1/responses/", "/responses/")
_MAX_VALUES = 500_000
"""Commas and brackets in a body: ranks refuse a body with more, and parsing it would block us."""
_MAX_LONG_BODIES = 8  # of the largest size in memory at once; one key may have half of them


class LongBodies:
    """Counts the bytes of the long bodies in memory, in total and by their key."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.total = 0
        self.by_key: Counter[bytes] = Counter()


class _BodyShare:
    """The bytes that one request occupies."""

    def __init__(self, bodies: LongBodies, key: bytes) -> None:
        self._bodies = bodies
        self._key = key
        self._size = 0
        self.parsing: asyncio.Future[Any] | None = None
        """The thread that parses the body."""

    def acquire(self, size: int) -> None:
        """Occupy so many bytes; ServiceUnavailable if there is no room.

        The only long body always has room; one key gets half of the room beside others.
        """
        bodies = self._bodies
        own, most = bodies.by_key[self._key], bodies.max_bytes
        too_many = bodies.total + size > most or (own and own + size > most // 2)
        if size and bodies.total and too_many:
            raise ServiceUnavailable(
                "too many long requests are in the router's memory; try again",
                code="too_many_requests",
                retry_after=2,
            )
        self.set_size(size)

    def set_size(self, size: int) -> None:
        """Correct the number of bytes."""
        bodies, by = self._bodies, size - self._size
        bodies.total += by
        bodies.by_key[self._key] += by
        if not bodies.by_key[self._key]:
            del bodies.by_key[self._key]
        self._size = size

    def release(self) -> None:
        """Release the bytes, once no thread uses them: it goes on when its client leaves."""
        if self.parsing is None or self.parsing.done():
            self.set_size(0)
        else:
            self.parsing.add_done_callback(lambda _: self.set_size(0))


class ImplicitAffinity:
    """Passes model calls on to the homes of their conversations."""

    def __init__(self, config: Config, forwarder: Forwarder) -> None:
        server = config.server
        self.on = config.sessions.implicit and server.ranks > 1
        self._ranks = server.ranks
        self._forwarder = forwarder
        self._max_body = server.max_body_bytes
        self.bodies = LongBodies(max(_MAX_LONG_BODIES * self._max_body, MAX_SHORT_BYTES))

    def applies(self, method: str, path: str, scope: Scope) -> bool:
        """Return whether to pass on a request that names no session by its conversation.

        Without keys every caller has the scope ADMIN.
        """
        if not self.on or scope not in (Scope.TENANT, Scope.ADMIN):
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
            return await self._forwarder.pass_on(request, self._rank_of_response(id), body)
        share = _BodyShare(self.bodies, _digest(key_in(request.headers)))
        try:
            content = await self._read(request, body, share)
            if len(content) > MAX_SHORT_BYTES:
                # Shielded: the body stays in memory until its thread has ended.
                loop = asyncio.get_running_loop()
                share.parsing = loop.run_in_executor(None, self._rank, path, content)
                rank = await asyncio.shield(share.parsing)
            else:
                rank = self._rank(path, content)
            return await self._forwarder.pass_on(request, rank, body, content=content)
        finally:
            share.release()

    async def _read(self, request: web.BaseRequest, body: RequestBody, share: _BodyShare) -> bytes:
        """Return the body; one of unknown length counts as the longest once it is not short."""
        if body.short:
            return await body.read()
        known = request.content_length
        share.acquire(known or 0)
        parts: list[bytes] = []
        size = 0
        async for part in body.stream():
            if known is None and size <= MAX_SHORT_BYTES < size + len(part):
                share.acquire(self._max_body)
            parts.append(part)
            size += len(part)
        share.set_size(size if size > MAX_SHORT_BYTES else 0)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _rank(self, path: str, content: bytes) -> int | None:
        """Return the rank of a call's conversation; None for a body that any rank will refuse."""
        if len(content) > _MAX_VALUES and sum(map(content.count, b",[{")) > _MAX_VALUES:
            return None
        fields = json_object(content)
        if fields is None:
            return None
        named = self._rank_of_response(fields.get("previous_response_id"))
        if named is not None:
            return named
        api = api_at(path)
        conversation = fields if api is None else api.conversation(fields)
        return home_of(task_of(conversation), self._ranks)

    def _rank_of_response(self, id: Any) -> int | None:
        rank = rank_of_response(id)
        return rank if rank is not None and rank < self._ranks else None


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
