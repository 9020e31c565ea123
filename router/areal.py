"""The routes that AReaL's users know, over all ranks.

A session opened here belongs to its task's home, as any does; one that is opened on a slot of
`/grant_capacity` has no group, so any rank that was granted one will do. No slot of the trainer's
is taken while one is granted anywhere.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

from aiohttp import web

from any_agent.auth.access import Access
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    RunFinished,
    ServiceUnavailable,
    TooManyRequests,
    from_response,
)
from any_agent.keys import SESSION_KEY_PREFIX
from any_agent.protocol.rl import GRANT_ONLY_HEADER
from router.affinity import SessionAffinity, home_of
from router.body import BodyFields, RequestBody
from router.client_response import ClientResponder
from router.fanout import Handler
from router.forward import Forwarder
from router.open_session import MAX_BYTES, not_begun
from router.rank_health import RankHealth
from router.repeats import IDEMPOTENCY_KEY
from router.slot_grants import GRANT, SlotGrants
from router.upstream import UpstreamResponse

AREAL_START = "/rl/start_session"
_GRANT_ONLY = MappingProxyType({GRANT_ONLY_HEADER: "1"})
_TRIES = 64
"""Of an open, when each time a slot was granted meanwhile and another open took it."""
_TIMEOUT = 10.0
"""Seconds with a rank that is asked while others wait to be; longer than any does it at once."""
_HUNG_FOR = 30.0
"""Seconds without questions about granted slots for a rank that did not answer one in time."""


class ArealRoutes:
    """`/grant_capacity`, `/rl/start_session`, `/export_trajectories`, `/health`.

    The others name their session by its key, or in their path: they are passed on as all are.
    """

    def __init__(
        self,
        affinity: SessionAffinity,
        ranks: RankHealth,
        forwarder: Forwarder,
        replies: ClientResponder,
        access: Access,
    ) -> None:
        self._affinity = affinity
        self._ranks = ranks
        self._forwarder = forwarder
        self._replies = replies
        self._grants = SlotGrants(ranks, forwarder, access)
        self._granted = 0
        """How often slots were granted through here so far, or may have been."""
        self._waiting: Counter[int] = Counter()
        """Opens that only this rank can serve, and that may wait there."""
        self._hung: dict[int, float] = {}
        """Until when a rank that did not answer in time is not asked for granted slots."""
        self._turn = 0
        self.routes: dict[tuple[str, str], Handler] = {
            ("POST", GRANT): self.grant,
            ("POST", AREAL_START): self.open,
            ("POST", "/export_trajectories"): self.export,
            ("GET", "/health"): self.health,
        }

    async def grant(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """One slot at one rank: the home of the task that it is for, if it says so, else the one
        that the idempotency key names, else where an open waits, else the ranks in turn."""
        said = BodyFields(request, await body.whole(MAX_BYTES))
        key = said.text("task_id") or request.headers.get(IDEMPOTENCY_KEY)
        if key is not None:
            rank = home_of(key, self._ranks.count)
        else:
            live = await self._ranks.reach_any(time.monotonic() + self._ranks.wait)
            self._turn += 1
            rank = live[self._turn % len(live)]
            rank = max(live, key=lambda each: (self._waiting[each], each == rank))
        deadline = time.monotonic() + self._ranks.wait
        try:
            answer = await self._forwarder.ask(
                request, rank, content=said.content or None, deadline=deadline
            )
        finally:
            # Before whoever asked for it hears of it.
            self._granted += 1
        return await self._replies.whole(request, answer.status, answer.headers, answer.body)

    async def open(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """On a granted slot, whichever rank has it; else where the trainer's slots are taken.

        An open with the key of an earlier session, or with an Idempotency-Key, is one rank's, so
        that it never opens twice: a granted slot is brought there. Any other one goes to the slot.
        """
        said = BodyFields(request, await body.whole(MAX_BYTES))
        if said.body is None or self._ranks.count == 1:
            # Any rank says what is wrong with it; a single one takes its granted slots first.
            return await self._forwarder.pass_on(request, None, body, content=said.content)
        task, key = said.text("task_id"), said.text("api_key")
        home = home_of(task, self._ranks.count) if task is not None else None
        lane = self._rank_of_key(key) if key is not None else None
        once = request.headers.get(IDEMPOTENCY_KEY)
        if lane is not None:
            answer = await self._at(request, said.content, lane, home)
        elif once is not None:
            bound = home if home is not None else home_of(f"key {once}", self._ranks.count)
            answer = await self._at(request, said.content, bound, home)
        else:
            answer = await self._anywhere(request, said.content, home)
        return await self._replies.whole(request, answer.status, answer.headers, answer.body)

    def _rank_of_key(self, key: str) -> int | None:
        """The rank of an earlier session's key; None for what is none, as any rank says."""
        return self._affinity.rank_of(key) if key.startswith(SESSION_KEY_PREFIX) else None

    async def _at(
        self, request: web.BaseRequest, content: bytes, rank: int, home: int | None
    ) -> UpstreamResponse:
        """At this rank and at no other one."""
        deadline = time.monotonic() + self._ranks.wait
        for _ in range(_TRIES):
            before = (self._granted, self._grants.moved)
            answer = await self._forwarder.ask(
                request, rank, content=content or None, deadline=deadline, more=_GRANT_ONLY
            )
            if not _without_slot(answer):
                return answer
            # Shielded: a slot that is on its way arrives, also if the client leaves.
            moving = asyncio.ensure_future(self._grants.bring(request, rank))
            brought = await asyncio.shield(moving)
            if not brought and before == (self._granted, self._grants.moved):
                break
        else:
            raise _too_many_grants()
        if home not in (None, rank):
            raise Conflict(
                f"the key belongs to rank {rank}, no slot is granted, and sessions of this task "
                f"live on rank {home}; open without api_key",
                code="lane_on_other_rank",
            )
        self._waiting[rank] += 1
        try:
            return await self._forwarder.ask(
                request, rank, content=content or None, deadline=deadline
            )
        finally:
            self._waiting[rank] -= 1

    async def _anywhere(
        self, request: web.BaseRequest, content: bytes, home: int | None
    ) -> UpstreamResponse:
        deadline = time.monotonic() + self._ranks.wait
        live = await self._ranks.reach_any(deadline)
        self._turn += 1
        order = [live[(self._turn + k) % len(live)] for k in range(len(live))]
        # At home first: its engine has the beginning of the task's prompt.
        order.sort(key=lambda rank: rank != home)
        answer = await self._on_grant(request, content, order)
        if answer is not None:
            return answer
        if home is not None:
            return await self._forwarder.ask(
                request, home, content=content or None, deadline=deadline
            )
        refusal: UpstreamResponse | None = None
        for rank in order:
            answer = await self._ask(request, rank, content)
            if answer is not None and not (_without_place(answer) or not_begun(answer)):
                return answer
            refusal = answer or refusal
        if refusal is None:
            raise ServiceUnavailable("no rank of the service is up; try again", retry_after=2)
        return refusal

    async def _on_grant(
        self, request: web.BaseRequest, content: bytes, order: list[int]
    ) -> UpstreamResponse | None:
        """The answer of the first rank that has a granted slot; None where none has one.

        The answer is None only after all were asked while no slot moved and none was granted:
        whoever asks for a slot that was granted to it finds one, since others take no more than
        theirs. Where slots do move, they are held at rest while the ranks are asked again.
        """
        resting, before = not self._grants.at_rest.locked(), (self._granted, self._grants.begun)
        answer = await self._first(request, content, order)
        if resting and before == (self._granted, self._grants.begun):
            return answer
        for _ in range(_TRIES):
            if answer is not None:
                return answer
            async with self._grants.at_rest:
                granted = self._granted
                answer = await self._first(request, content, order)
                if answer is None and self._granted == granted:
                    return None
        raise _too_many_grants()

    async def _first(
        self, request: web.BaseRequest, content: bytes, order: list[int]
    ) -> UpstreamResponse | None:
        for rank in order:
            if self._hung.get(rank, 0.0) > time.monotonic():
                continue
            answer = await self._ask(request, rank, content, _GRANT_ONLY)
            if answer is not None and not (_without_place(answer) or not_begun(answer)):
                return answer
        return None

    async def _ask(
        self,
        request: web.BaseRequest,
        rank: int,
        content: bytes,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> UpstreamResponse | None:
        """A rank's answer; None if it went away. Whether it opened one then, nobody knows, and
        nobody has its key."""
        try:
            async with asyncio.timeout(_TIMEOUT):
                return await self._forwarder.ask(request, rank, content=content or None, more=more)
        except TimeoutError:
            self._hung[rank] = time.monotonic() + _HUNG_FOR
            return None
        except AnyAgentError:
            return None

    async def export(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """From the session's rank."""
        said = BodyFields(request, await body.whole(MAX_BYTES))
        name = said.text("session_id")
        rank = self._affinity.rank_of(name) if name is not None else None
        return await self._forwarder.pass_on(request, rank, body, content=said.content)

    async def health(self, request: web.BaseRequest, _: RequestBody) -> web.StreamResponse:
        """The process lives; how many ranks serve."""
        data = {"status": "ok", "workers": len(self._ranks.live)}
        return await self._replies.json(request, data)


def _without_slot(answer: UpstreamResponse) -> bool:
    """Whether a rank opened none for want of a slot; without a training, for want of a grant."""
    error = from_response(answer.status, answer.body, None)
    return isinstance(error, RunFinished) or (
        isinstance(error, TooManyRequests) and error.code == TooManyRequests.default_code
    )


def _without_place(answer: UpstreamResponse) -> bool:
    """Return whether it is so, or the rank takes no more of this caller's sessions."""
    return answer.status == HTTPStatus.TOO_MANY_REQUESTS or _without_slot(answer)


def _too_many_grants() -> ServiceUnavailable:
    return ServiceUnavailable("slots are granted faster than ranks are asked", retry_after=1)
