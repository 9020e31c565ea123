"""Where a model call goes that names no session: to the home of its conversation.

What a conversation began with is in every call of it, so each router, and one that was started
again, finds the same rank, where the conversation's session is. With implicit sessions only.
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
from any_agent.errors import InvalidRequest, ServiceUnavailable
from any_agent.protocol.conversation_key import rank_of_response, task_of
from router.affinity import home_of, key_in
from router.body import WHOLE, RequestBody, json_object
from router.forward import Forwarder

_RESPONSES = ("/v1/responses/", "/responses/")
_MAX_VALUES = 500_000
"""Commas and brackets; ranks refuse a body with more of them, and here it would stop everybody."""
_HELD = 8
"""Long bodies of the largest size that are held here at once; one key may have half of them."""
_UPLOAD = 120.0
"""Seconds in which a long body has to be here."""


class HomeRank:
    """Bytes of the long bodies that are here, altogether and by the key that they came with."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.all = 0
        self.by_key: Counter[bytes] = Counter()

    def change(self, key: bytes, by: int) -> None:
        self.all += by
        self.by_key[key] += by
        if not self.by_key[key]:
            del self.by_key[key]

    def has_room(self, key: bytes, size: int) -> bool:
        """One body is held, whatever its size."""
        own = self.by_key[key]
        if not size or not self.all:
            return True
        return self.all + size <= self.most and (not own or own + size <= self.most // 2)


class _Share:
    """What one request has of it."""

    def __init__(self, held: HomeRank, key: bytes) -> None:
        self._held = held
        self._key = key
        self._size = 0
        self.reading: asyncio.Future[Any] | None = None
        """A thread that is at work on the body."""

    def take(self, size: int) -> None:
        """ServiceUnavailable beyond the bound."""
        if not self._held.has_room(self._key, size):
            raise ServiceUnavailable(
                "the router holds as many long requests as it may; try again",
                code="too_many_requests",
                retry_after=2,
            )
        self.correct(size)

    def correct(self, size: int) -> None:
        """So much it is in fact."""
        self._held.change(self._key, size - self._size)
        self._size = size

    def end(self) -> None:
        """Give it back; a thread that goes on has the body, though its client left."""
        if self.reading is None or self.reading.done():
            self.correct(0)
        else:
            self.reading.add_done_callback(lambda _: self.correct(0))


class ImplicitAffinity:
    """The rule, and what it holds meanwhile."""

    def __init__(self, config: Config, forwarder: Forwarder) -> None:
        server = config.server
        self.on = config.sessions.implicit and server.ranks > 1
        self._ranks = server.ranks
        self._forwarder = forwarder
        self._max_body = server.max_body_bytes
        self.held = HomeRank(max(_HELD * self._max_body, WHOLE))

    def takes(self, method: str, path: str, scope: Scope) -> bool:
        """Whether a request that names no session is placed here; ADMIN is everybody, where there
        is no key."""
        if not self.on or scope not in (Scope.TENANT, Scope.ADMIN):
            return False
        if method != "POST":
            return path.startswith(_RESPONSES)
        api = api_at(path)
        return api is not None and api.by_policy

    async def place(
        self, request: web.BaseRequest, path: str, body: RequestBody
    ) -> web.StreamResponse:
        """Pass it on to the rank where its conversation is at home."""
        if request.method != "POST":
            id = path.removeprefix("/v1").split("/")[2]
            return await self._forwarder.pass_on(request, self._of_response(id), body)
        share = _Share(self.held, _digest(key_in(request.headers)))
        try:
            content = await self._read(request, body, share)
            if len(content) > WHOLE:
                # Shielded: what waits for a thread, or is in one, stays until it has been there.
                loop = asyncio.get_running_loop()
                share.reading = loop.run_in_executor(None, self._rank, path, content)
                rank = await asyncio.shield(share.reading)
            else:
                rank = self._rank(path, content)
            return await self._forwarder.pass_on(request, rank, body, content=content)
        finally:
            share.end()

    async def _read(self, request: web.BaseRequest, body: RequestBody, share: _Share) -> bytes:
        """The body, counted. One of unknown length counts as the longest once it is not short."""
        if body.short:
            return await body.whole()
        known = request.content_length
        share.take(known or 0)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_UPLOAD):
                async for part in body.stream():
                    if known is None and size <= WHOLE < size + len(part):
                        share.take(self._max_body)
                    parts.append(part)
                    size += len(part)
        except TimeoutError:
            raise InvalidRequest(
                f"the body did not come within {_UPLOAD:g} s", code="body_timeout"
            ) from None
        share.correct(size if size > WHOLE else 0)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _rank(self, path: str, content: bytes) -> int | None:
        """None for what any rank will refuse."""
        if len(content) > _MAX_VALUES and sum(map(content.count, b",[{")) > _MAX_VALUES:
            return None
        fields = json_object(content)
        if fields is None:
            return None
        named = self._of_response(fields.get("previous_response_id"))
        if named is not None:
            return named
        api = api_at(path)
        conversation = fields if api is None else api.conversation(fields)
        return home_of(task_of(conversation), self._ranks)

    def _of_response(self, id: Any) -> int | None:
        rank = rank_of_response(id)
        return rank if rank is not None and rank < self._ranks else None


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
