"""The routes that AReaL's users know, over all ranks.

A session opened here belongs to its task's home, as any does; one that is opened on a slot of
`/grant_capacity` has no group, so any rank that was granted one will do.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

from aiohttp import web

from any_agent.errors import AnyAgentError, Conflict, RunFinished, from_response
from any_agent.keys import SESSION_KEY_PREFIX
from router.affinity import Affinity, home_of
from router.body import Body, dumped, json_object
from router.fanout import Handler
from router.forward import Forwarder
from router.health import Ranks
from router.opens import MAX_BYTES
from router.repeats import IDEMPOTENCY_KEY
from router.reply import Replies
from router.upstream import Answer

AREAL_START = "/rl/start_session"


class ArealRoutes:
    """`/grant_capacity`, `/rl/start_session`, `/export_trajectories`, `/health`.

    The others name their session by its key, or in their path: they are passed on as all are.
    """

    def __init__(
        self, affinity: Affinity, ranks: Ranks, forwarder: Forwarder, replies: Replies
    ) -> None:
        self._affinity = affinity
        self._ranks = ranks
        self._forwarder = forwarder
        self._replies = replies
        self._turn = 0
        self.routes: dict[tuple[str, str], Handler] = {
            ("POST", "/grant_capacity"): self.grant,
            ("POST", AREAL_START): self.open,
            ("POST", "/export_trajectories"): self.export,
            ("GET", "/health"): self.health,
        }

    async def grant(self, request: web.BaseRequest, body: Body) -> web.StreamResponse:
        """One slot at one rank: the home of the task that it is for, if it says so, else the one
        that the idempotency key names, else the ranks in turn."""
        content = await body.whole(MAX_BYTES)
        task = _text(json_object(content) or {}, "task_id")
        key = task or request.headers.get(IDEMPOTENCY_KEY)
        if key is not None:
            rank = home_of(key, self._ranks.count)
        else:
            live = await self._ranks.reach_any(time.monotonic() + self._ranks.wait)
            self._turn += 1
            rank = live[self._turn % len(live)]
        return await self._forwarder.pass_on(request, rank, body, content=content)

    async def open(self, request: web.BaseRequest, body: Body) -> web.StreamResponse:
        """At the rank of the key, else at the task's home, else where a slot was granted."""
        content = await body.whole(MAX_BYTES)
        fields = json_object(content) or {}
        task, key = _text(fields, "task_id"), _text(fields, "api_key")
        if task is None:
            # Any rank says what is wrong with it.
            return await self._forwarder.pass_on(request, None, body, content=content)
        home = home_of(task, self._ranks.count)
        lane = home if key is None else self._rank_of_key(key, home)
        if lane != home:
            answer = await self._at_lane(request, fields, lane, home)
        elif key is not None or IDEMPOTENCY_KEY in request.headers:
            # The answer is kept at one rank, so no other one may be tried.
            return await self._forwarder.pass_on(request, home, body, content=content)
        else:
            answer = await self._anywhere(request, fields, content, home)
        return await self._replies.whole(request, answer.status, answer.headers, answer.body)

    def _rank_of_key(self, key: str, home: int) -> int:
        """The rank of an earlier session's key; the home for what is none, which says so."""
        rank = self._affinity.rank_of(key) if key.startswith(SESSION_KEY_PREFIX) else None
        return home if rank is None else rank

    async def _at_lane(
        self, request: web.BaseRequest, fields: dict[str, Any], lane: int, home: int
    ) -> Answer:
        """The next session of a key whose rank is not the task's home, so without a group."""
        deadline = time.monotonic() + self._ranks.wait
        answer = await self._granted(request, fields, lane, deadline)
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise Conflict(
                f"the key belongs to rank {lane}, where no slot is granted, and sessions of this "
                f"task live on rank {home}; open without api_key",
                code="lane_on_other_rank",
            )
        return answer

    async def _anywhere(
        self, request: web.BaseRequest, fields: dict[str, Any], content: bytes, home: int
    ) -> Answer:
        deadline = time.monotonic() + self._ranks.wait
        refusal = await self._forwarder.ask(request, home, content=content, deadline=deadline)
        if not _without_slot(refusal):
            return refusal
        for rank in self._ranks.live:
            if rank == home:
                continue
            try:
                answer = await self._granted(request, fields, rank, 0.0)
            except AnyAgentError:
                # It went away; whether it opened one, nobody knows, and nobody has its key.
                continue
            if answer.status < HTTPStatus.BAD_REQUEST:
                return answer
        return refusal

    async def _granted(
        self, request: web.BaseRequest, fields: dict[str, Any], rank: int, deadline: float
    ) -> Answer:
        """A rank's answer to an open that takes nothing but a granted slot."""
        content = dumped(fields | {"grant_only": True})
        return await self._forwarder.ask(request, rank, content=content, deadline=deadline)

    async def export(self, request: web.BaseRequest, body: Body) -> web.StreamResponse:
        """From the session's rank."""
        content = await body.whole(MAX_BYTES)
        name = _text(json_object(content) or {}, "session_id")
        rank = self._affinity.rank_of(name) if name is not None else None
        return await self._forwarder.pass_on(request, rank, body, content=content)

    async def health(self, request: web.BaseRequest, _: Body) -> web.StreamResponse:
        """The process lives; how many ranks serve."""
        data = {"status": "ok", "workers": len(self._ranks.live)}
        return await self._replies.json(request, data)


def _without_slot(answer: Answer) -> bool:
    """Whether a rank opened none for want of a slot; without a training, for want of a grant."""
    if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
        return True
    return isinstance(from_response(answer.status, answer.body, None), RunFinished)


def _text(fields: dict[str, Any], name: str) -> str | None:
    """A field that is a non-empty text."""
    value = fields.get(name)
    return value if isinstance(value, str) and value else None
