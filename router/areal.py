"""The routes of the AReaL documents over all ranks, and the way of granted slots between ranks.

A session opened here belongs to its task's home, like any other. One that opens on a slot of
`/grant_capacity` has no group, so any rank with a granted slot will do, and no slot of the trainer
is taken while a granted one is left anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from types import MappingProxyType
from typing import Literal, TypeAlias

import orjson
from aiohttp import web
from multidict import CIMultiDict

from any_agent.auth.access import RUN, Access
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    RunFinished,
    ServiceUnavailable,
    TooManyRequests,
    Unauthenticated,
    from_response,
)
from any_agent.keys import SESSION_KEY_PREFIX
from any_agent.protocol.rl import FLEET_HEADER, GRANT_ONLY_HEADER
from router.affinity import SessionAffinity, homes_of, key_in
from router.body import BodyFields, RequestBody
from router.fanout import Handler
from router.forward import IDEMPOTENCY_KEY, Forwarder
from router.open_session import MAX_BYTES, not_begun
from router.upstream import UpstreamResponse

log = logging.getLogger(__name__)

GRANT = "/grant_capacity"
AREAL_START = "/rl/start_session"
_GRANT_ONLY = MappingProxyType({GRANT_ONLY_HEADER: "1"})
MAX_TRIES = 64  # of an open, if each time another open took the slot that was granted meanwhile
ASK_TIMEOUT = 10.0  # seconds for a rank's answer while other ranks are still to be asked
_HUNG_SECONDS = 30.0
"""Time for which a rank that did not answer in time is not asked for granted slots."""
MOVE_TIMEOUT = 10.0  # seconds for one rank's part in moving a slot
_MOVE_TRIES = 4  # requests in that time, under one idempotency key
_Owner: TypeAlias = Literal["run", "others"]


class SlotGrants:
    """Moves slots of `/grant_capacity` between ranks, one at a time."""

    def __init__(self, forwarder: Forwarder, access: Access) -> None:
        self._forwarder = forwarder
        self._access = access
        self.at_rest = asyncio.Lock()
        """A lock that is held while a slot is under way, and therefore at no rank."""
        self.searches = 0
        """Number of times that a slot to move was searched."""
        self.moved = 0
        """Number of slots that were moved."""

    async def move_to(self, request: web.BaseRequest, to: int) -> bool:
        """Bring a slot that the request's sender may use to a rank; False if no other rank has one.

        Ranks that are away are passed over. A slot is never at two ranks. It is lost only with the
        router, or if a rank dies or does not answer in time while it gives or gets the slot.
        """
        of: _Owner = "others"
        # LiteLLM may know another key, which the rank has asked it for.
        with suppress(Unauthenticated):
            of = "run" if self._access.caller(key_in(request.headers)) == RUN else "others"
        async with self.at_rest:
            self.searches += 1
            for rank in self._forwarder.ranks.live:
                if rank == to or not await self._change(rank, -1, of):
                    continue
                arrived = await self._change(to, 1, of)
                if arrived:
                    self.moved += 1
                elif arrived is None:
                    log.warning(
                        "rank %d did not confirm that it got a granted slot of rank %d", to, rank
                    )
                else:
                    await self._change(rank, 1, of)
                return bool(arrived)
        return False

    async def _change(self, rank: int, change: Literal[-1, 1], of: _Owner) -> bool | None:
        """Return whether the rank made the change; None if that is unknown after all tries."""
        content = orjson.dumps({"change": change, "of": of})
        headers = CIMultiDict({"Authorization": f"Bearer {self._access.signer.run_key}"})
        headers[IDEMPOTENCY_KEY] = uuid.uuid4().hex
        sent = False
        for _ in range(_MOVE_TRIES):
            try:
                async with asyncio.timeout(MOVE_TIMEOUT / _MOVE_TRIES):
                    answer = await self._forwarder.exchange(
                        rank, "POST", GRANT, headers.copy(), content
                    )
                return answer.status == HTTPStatus.OK
            except ServiceUnavailable:
                # The rank is away; an earlier try may have reached it.
                return None if sent else False
            except (AnyAgentError, TimeoutError):
                sent = True
        return None


class ArealRoutes:
    """`/grant_capacity`, `/rl/start_session`, `/health`; the other routes name their session."""

    def __init__(self, affinity: SessionAffinity, forwarder: Forwarder, access: Access) -> None:
        self._affinity = affinity
        self._ranks = forwarder.ranks
        self._forwarder = forwarder
        self._grants = SlotGrants(forwarder, access)
        self._granted = 0
        """Number of requests for slots that were, or may have been, granted through this router."""
        self._waiting: Counter[int] = Counter()
        """Number of opens that may wait at a rank because no other can serve them."""
        self._hung_until: dict[int, float] = {}
        """End of the time for which a rank that did not answer is not asked for granted slots."""
        self._turn = 0
        self.routes: dict[tuple[str, str], Handler] = {
            ("POST", GRANT): self.grant,
            ("POST", AREAL_START): self.open,
            ("GET", "/health"): self.health,
        }

    async def grant(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """Grant a slot at one rank.

        That is the home of the task in the request, else the home of the idempotency key, else a
        rank where an open waits, else the next rank in turn.
        """
        fields = BodyFields(request, await body.read(MAX_BYTES))
        key = fields.text("task_id") or request.headers.get(IDEMPOTENCY_KEY)
        deadline = time.monotonic() + self._ranks.wait
        rank = 0
        if key is None:
            live = await self._ranks.reach_any(deadline)
            live = [each for each in live if self._ranks.fleet.state(each) == "serving"] or live
            self._turn += 1
            rank = live[self._turn % len(live)]
            rank = max(live, key=lambda each: (self._waiting[each], each == rank))
            deadline = time.monotonic() + self._ranks.wait
        try:
            answer = await self._forwarder.ask_homes(
                lambda: homes_of(key, self._ranks.fleet) if key is not None else [rank],
                lambda home, more: self._forwarder.ask(
                    request, home, content=fields.content, deadline=deadline, more=more
                ),
            )
        finally:
            # Counted before the client gets its answer.
            self._granted += 1
        return await self._forwarder.answer_with(request, answer)

    async def open(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """Open a session on a granted slot of any rank, else on a slot of the trainer.

        An open with the key of an earlier session, or with an Idempotency-Key, belongs to one rank,
        so that it never opens twice: a granted slot is brought there. Any other goes to the slot.
        """
        fields = BodyFields(request, await body.read(MAX_BYTES))
        if fields.body is None or len(self._ranks.fleet.ranks) == 1:
            # Any rank reports what is wrong with it; a single rank takes its granted slots first.
            return await self._forwarder.pass_on(request, None, body, content=fields.content)
        task, key = fields.text("task_id"), fields.text("api_key")
        earlier = key is not None and key.startswith(SESSION_KEY_PREFIX)
        bound = self._affinity.rank_of(key) if key is not None and earlier else None
        once = request.headers.get(IDEMPOTENCY_KEY)
        if bound is not None:
            answer = await self._open_with_key(request, fields.content, bound, task)
        elif once is not None:
            answer = await self._open_once(request, fields.content, task or f"key {once}")
        else:
            answer = await self._open_anywhere(request, fields.content, task)
        return await self._forwarder.answer_with(request, answer)

    async def _open_once(
        self, request: web.BaseRequest, content: bytes, name: str
    ) -> UpstreamResponse:
        """Open at the rank that answered an earlier equal request, or where the name begins."""
        deadline = time.monotonic() + self._ranks.wait

        async def ask(rank: int, more: Mapping[str, str]) -> UpstreamResponse:
            answer = None
            if not more[FLEET_HEADER].endswith("member"):
                answer = await self._open_on_brought(request, content, rank, deadline)
            return answer or await self._open_waiting(request, content, rank, deadline, more)

        return await self._forwarder.ask_homes(lambda: homes_of(name, self._ranks.fleet), ask)

    async def _open_with_key(
        self, request: web.BaseRequest, content: bytes, rank: int, task: str | None
    ) -> UpstreamResponse:
        deadline = time.monotonic() + self._ranks.wait
        answer = await self._open_on_brought(request, content, rank, deadline)
        if answer is not None:
            return answer

        def homes() -> list[int]:
            found = homes_of(task, self._ranks.fleet) if task is not None else [rank]
            if rank not in found:
                raise Conflict(
                    f"the key belongs to rank {rank}, no slot is granted, and sessions of this "
                    f"task live on rank {found[-1]}; open without api_key",
                    code="lane_on_other_rank",
                )
            return found

        return await self._forwarder.ask_homes(
            homes, lambda home, more: self._open_waiting(request, content, home, deadline, more)
        )

    async def _open_on_brought(
        self, request: web.BaseRequest, content: bytes, rank: int, deadline: float
    ) -> UpstreamResponse | None:
        """Open on a granted slot of this rank, or of another one, which is brought here; None if no
        rank has one."""
        for _ in range(MAX_TRIES):
            before = (self._granted, self._grants.moved)
            answer = await self._forwarder.ask(
                request, rank, content=content, deadline=deadline, more=_GRANT_ONLY
            )
            if not _has_no_slot(answer):
                return answer
            # Shielded: a slot that is under way arrives, even if the client leaves.
            moving = asyncio.ensure_future(self._grants.move_to(request, rank))
            brought = await asyncio.shield(moving)
            if not brought and before == (self._granted, self._grants.moved):
                return None
        raise _too_many_grants()

    async def _open_waiting(
        self,
        request: web.BaseRequest,
        content: bytes,
        rank: int,
        deadline: float,
        more: Mapping[str, str],
    ) -> UpstreamResponse:
        self._waiting[rank] += 1
        try:
            return await self._forwarder.ask(
                request, rank, content=content, deadline=deadline, more=more
            )
        finally:
            self._waiting[rank] -= 1

    async def _open_anywhere(
        self, request: web.BaseRequest, content: bytes, task: str | None
    ) -> UpstreamResponse:
        deadline = time.monotonic() + self._ranks.wait
        live = await self._ranks.reach_any(deadline)
        homes = homes_of(task, self._ranks.fleet) if task is not None else []
        self._turn += 1
        order = [live[(self._turn + k) % len(live)] for k in range(len(live))]
        # The home first: its engine has the beginning of the task's prompt.
        order.sort(key=lambda rank: rank not in homes[-1:])
        answer = await self._open_on_grant(request, content, order)
        if answer is not None:
            return answer
        if task is not None:
            return await self._forwarder.ask_homes(
                lambda: homes_of(task, self._ranks.fleet),
                lambda rank, more: self._forwarder.ask(
                    request, rank, content=content, deadline=deadline, more=more
                ),
            )
        refusal: UpstreamResponse | None = None
        for rank in order:
            answer = await self._ask(request, rank, content)
            if answer is not None and not _may_ask_others(answer):
                return answer
            refusal = answer or refusal
        if refusal is None:
            raise ServiceUnavailable("no rank of the service is up; try again", retry_after=2)
        return refusal

    async def _open_on_grant(
        self, request: web.BaseRequest, content: bytes, order: list[int]
    ) -> UpstreamResponse | None:
        """Return the answer of the first rank that has a granted slot; None if none has one.

        It is None only after all ranks were asked while no slot moved and none was granted. So the
        caller for whom a slot was granted finds one, since other callers take no more than theirs.
        While slots move, the ranks are asked again under the lock that stops them.
        """
        resting, before = not self._grants.at_rest.locked(), (self._granted, self._grants.searches)
        answer = await self._ask_for_grant(request, content, order)
        tries = 0
        while not (answer or (resting and before == (self._granted, self._grants.searches))):
            if tries == MAX_TRIES:
                raise _too_many_grants()
            tries += 1
            async with self._grants.at_rest:
                resting, before = True, (self._granted, self._grants.searches)
                answer = await self._ask_for_grant(request, content, order)
        return answer

    async def _ask_for_grant(
        self, request: web.BaseRequest, content: bytes, order: list[int]
    ) -> UpstreamResponse | None:
        for rank in order:
            if self._hung_until.get(rank, 0.0) > time.monotonic():
                continue
            answer = await self._ask(request, rank, content, _GRANT_ONLY)
            if answer is not None and not _may_ask_others(answer):
                return answer
        return None

    async def _ask(
        self,
        request: web.BaseRequest,
        rank: int,
        content: bytes,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> UpstreamResponse | None:
        """Return a rank's answer; None if it went away, perhaps after it opened a session whose key
        no client has."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT):
                return await self._forwarder.ask(request, rank, content=content, more=more)
        except TimeoutError:
            self._hung_until[rank] = time.monotonic() + _HUNG_SECONDS
            return None
        except AnyAgentError:
            return None

    async def health(self, request: web.BaseRequest, _: RequestBody) -> web.StreamResponse:
        """Answer that the process lives, and how many ranks serve."""
        data = {"status": "ok", "workers": len(self._ranks.live)}
        return await self._forwarder.replies.json(request, data)


def _has_no_slot(answer: UpstreamResponse) -> bool:
    """Return whether a rank lacked a slot, or without a training a grant, to open a session."""
    error = from_response(answer.status, answer.body, None)
    return isinstance(error, RunFinished) or (
        isinstance(error, TooManyRequests) and error.code == TooManyRequests.default_code
    )


def _may_ask_others(answer: UpstreamResponse) -> bool:
    """Return whether another rank may open the session: this one had no slot or took no more."""
    full = answer.status == HTTPStatus.TOO_MANY_REQUESTS
    return full or _has_no_slot(answer) or not_begun(answer)


def _too_many_grants() -> ServiceUnavailable:
    return ServiceUnavailable(
        "slots are granted faster than the ranks can be asked for one; try again", retry_after=1
    )
