"""Routing of `start_session`: to the group's home, to the key's rank, else to a rank with a slot.

A rank that stalls, as a stopped process does, is given up: another one is asked, or the client gets
503. If the stalled one opens a session after all, the router aborts it.

An open with an Idempotency-Key that nothing else binds to a rank goes to the key's home, like a
group, and to no other rank: only that one knows how it answered an earlier equal request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from types import MappingProxyType

import orjson
from aiohttp import web
from aiohttp.hdrs import AUTHORIZATION
from multidict import CIMultiDict

from any_agent.errors import (
    AnyAgentError,
    Draining,
    ServiceUnavailable,
    StoreBusy,
    from_response,
)
from router.affinity import SESSIONS_PATH, SessionAffinity, homes_of, key_in
from router.body import BodyFields, RequestBody, seconds
from router.forward import IDEMPOTENCY_KEY, Forwarder
from router.upstream import OUT_OF_DESCRIPTORS, UpstreamResponse

log = logging.getLogger(__name__)

START = "/rl/v1/start_session"
_LATE = 120.0
"""Seconds for which the answer of a rank that was given up is awaited, longer than the launcher
lets a stalled one live."""
MAX_LATE = 64
"""Answers that are awaited so at once: each holds a connection, beyond those that clients pay for
with their own."""
_ABORT = orjson.dumps({"reason": "its opener was sent elsewhere", "keep_place": True})
"""The group keeps the place for the opener's next try."""
_CROWDED = ("too_many_connections", "too_many_requests", "too_many_bytes")
"""The codes of a rank's 503 to a request that it did not even read."""
MAX_BYTES = 1 << 20  # size of the bodies of `/rl` routes that the router reads


class RankStalled(ServiceUnavailable):
    """The rank took the request and does not answer."""


class OpenRoute:
    """Opens sessions for agents."""

    def __init__(self, affinity: SessionAffinity, forwarder: Forwarder) -> None:
        self._affinity = affinity
        self._ranks = forwarder.ranks
        self._forwarder = forwarder
        self._late: set[asyncio.Task[None]] = set()
        """Wait for the answers of ranks that were given up."""
        self._turns: Counter[str] = Counter()
        self._queued: Counter[int] = Counter()
        """Number of opens that this router lets wait for a slot, by rank."""

    async def open(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """Answer as the rank that opened the session, or as the last one that could not."""
        fields = BodyFields(request, await body.read(MAX_BYTES))
        if fields.body is None:
            return await self._forwarder.pass_on(request, None, body, content=fields.content)
        train = fields.text("mode") != "eval"
        key = request.headers.get(IDEMPOTENCY_KEY) if request.method == "POST" else None

        def homes() -> list[int] | None:
            found = self._affinity.homes(
                api_key=fields.text("api_key"),
                group_id=fields.text("group_id") if train else None,
                task_id=fields.text("task_id") if train else None,
            )
            return homes_of(f"key {key}", self._ranks.fleet) if found is None and key else found

        if homes() is not None:
            deadline = time.monotonic() + self._ranks.wait
            answer = await self._forwarder.ask_homes(
                lambda: homes() or [],
                lambda rank, more: self._exchange(
                    request, rank, fields.content, deadline=deadline, more=more
                ),
            )
        else:
            answer = await self._open_anywhere(request, fields, "train" if train else "eval")
        return await self._forwarder.answer_with(request, answer)

    async def _open_anywhere(
        self, request: web.BaseRequest, fields: BodyFields, mode: str
    ) -> UpstreamResponse:
        """Ask each rank in turn; if none has a slot, wait at one as long as the caller does."""
        # A `wait` that is not a number is refused by any rank.
        wait = seconds(fields.get("wait")) or 0.0
        deadline = time.monotonic() + wait
        give_up = time.monotonic() + self._ranks.wait
        at_once = (fields.content, None) if not wait else _with_wait(request, fields, 0)
        self._turns[mode] += 1
        turn = self._turns[mode]
        given_up: set[int] = set()
        while True:
            await self._ranks.reach_any(give_up)
            live = [rank for rank in self._ranks.fit if rank not in given_up]
            if not live:
                raise ServiceUnavailable("no rank opens a session now; try again", retry_after=2)
            full: list[int] = []
            refusal: UpstreamResponse | None = None
            for k in range(len(live)):
                rank = live[(turn + k) % len(live)]
                answer = await self._ask(request, rank, given_up, *at_once)
                if answer is None:
                    continue
                if answer.status == 429:
                    full.append(rank)
                elif not not_begun(answer):
                    return answer
                if answer.status == 429 or refusal is None:
                    # A 429 comes first: its slot can be waited for.
                    refusal = answer
            if refusal is None:
                # All ranks went away; wait for one.
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not full:
                return refusal
            rank = min(full, key=self._waiting_at)
            self._queued[rank] += 1
            try:
                waiting = _with_wait(request, fields, round(remaining, 3))
                answer = await self._ask(request, rank, given_up, *waiting)
            finally:
                self._queued[rank] -= 1
            if answer is not None:
                return answer

    def _waiting_at(self, rank: int) -> int:
        """Return how many opens wait at a rank; its own number is up to a second old."""
        entry = self._ranks.entry(rank)
        return max(self._queued[rank], entry.load.waiting if entry else 0)

    async def _ask(
        self,
        request: web.BaseRequest,
        rank: int,
        given_up: set[int],
        content: bytes,
        target: str | None,
    ) -> UpstreamResponse | None:
        """Return a rank's answer; None if it is away, or stalls and is given up."""
        try:
            return await self._exchange(request, rank, content, target)
        except RankStalled:
            given_up.add(rank)
            return None
        except ServiceUnavailable as error:
            if error.code == OUT_OF_DESCRIPTORS:
                # The rank is there, so nothing would be waited for before the next try.
                raise
            return None

    async def _exchange(
        self,
        request: web.BaseRequest,
        rank: int,
        content: bytes,
        target: str | None = None,
        deadline: float = 0.0,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> UpstreamResponse:
        """Return a rank's answer; RankStalled if the rank stalls before, ServiceUnavailable if it
        is away at the deadline."""
        asking = asyncio.create_task(
            self._forwarder.ask(
                request, rank, content=content, target=target, deadline=deadline, more=more
            )
        )
        with self._ranks.stall(rank) as end:
            asking.add_done_callback(partial(_finish, end))
            try:
                await end
            except asyncio.CancelledError:
                asking.cancel()
                raise
        if asking.done():
            return asking.result()
        if IDEMPOTENCY_KEY in request.headers or len(self._late) >= MAX_LATE:
            # A retry with the key gets the session; without one it expires as idle.
            asking.cancel()
        else:
            opener = key_in(request.headers)
            task = asyncio.create_task(self._abort_late(asking, rank, opener))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        raise RankStalled(
            f"rank {rank}, where this session must be, does not answer; try again", retry_after=2
        )

    async def _abort_late(
        self, asking: asyncio.Task[UpstreamResponse], rank: int, opener: str
    ) -> None:
        """Abort the session that a rank opens though its client was sent elsewhere, by its own key
        or by its opener's."""
        try:
            async with asyncio.timeout(_LATE):
                answer = await asking
                if answer.status == 200:
                    session = orjson.loads(answer.body)
                    own = session.get("judge_key") or session["api_key"]
                    path = f"{SESSIONS_PATH}{session['session_id']}/abort"
                    # Where the operator's judge alone rewards, the session's key may not abort it.
                    for key in (own, opener):
                        headers = CIMultiDict({AUTHORIZATION: f"Bearer {key}"})
                        done = await self._forwarder.exchange(rank, "POST", path, headers, _ABORT)
                        if done.status != HTTPStatus.FORBIDDEN:
                            break
                    if done.status != 200:
                        log.warning("rank %d opened a session in vain: %d", rank, done.status)
        except (AnyAgentError, TimeoutError, ValueError, KeyError) as error:
            log.info("rank %d was given up for an open: %s", rank, type(error).__name__)


def _finish(end: asyncio.Future[None], _: object) -> None:
    if not end.done():
        end.set_result(None)


def _with_wait(request: web.BaseRequest, fields: BodyFields, wait: float) -> tuple[bytes, str]:
    """Return the body and the target of the same open with another `wait`."""
    content, target = fields.changed(wait=wait)
    if request.method == "GET":
        return fields.content, f"{target}{'&' if '?' in target else '?'}wait={wait}"
    return content, target


def not_begun(answer: UpstreamResponse) -> bool:
    """Return whether the rank did not begin: after its other failures a session may exist.

    A write may reach the disk and fail to report it, and one open must open one session.
    """
    error = from_response(answer.status, answer.body, None)
    crowded = answer.status == HTTPStatus.SERVICE_UNAVAILABLE and error.code in _CROWDED
    return crowded or isinstance(error, StoreBusy | Draining)
