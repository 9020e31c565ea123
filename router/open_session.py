"""Where a session is opened: at its group's home, at its key's rank, else where a slot is free.

An open with an Idempotency-Key that nothing else binds to a rank goes to the key's home, like a
group, and to no other rank: only the one that was asked first knows what it answered.
"""

from __future__ import annotations

import time
from collections import Counter

from aiohttp import web

from any_agent.errors import Draining, ServiceUnavailable, StoreBusy, from_response
from router.affinity import SessionAffinity, home_of
from router.body import BodyFields, RequestBody, seconds
from router.client_response import ClientResponder
from router.forward import Forwarder
from router.rank_health import RankHealth
from router.repeats import IDEMPOTENCY_KEY
from router.upstream import UpstreamResponse

START = "/rl/v1/start_session"
MAX_BYTES = 1 << 20
"""Of the bodies of `/rl` routes that are read here."""


class OpenRoute:
    """Opens sessions for agents."""

    def __init__(
        self,
        affinity: SessionAffinity,
        ranks: RankHealth,
        forwarder: Forwarder,
        replies: ClientResponder,
    ) -> None:
        self._affinity = affinity
        self._ranks = ranks
        self._forwarder = forwarder
        self._replies = replies
        self._turns: Counter[str] = Counter()
        self._queued: Counter[int] = Counter()
        """Opens that wait for a slot at a rank, as far as they came through here."""

    async def open(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """Answer as the rank does that opened it, or as the last one that could not."""
        one = BodyFields(request, await body.whole(MAX_BYTES))
        if one.body is None:
            return await self._forwarder.pass_on(request, None, body, content=one.content)
        train = one.text("mode") != "eval"
        home = self._affinity.home(
            api_key=one.text("api_key"),
            group_id=one.text("group_id") if train else None,
            task_id=one.text("task_id") if train else None,
        )
        key = request.headers.get(IDEMPOTENCY_KEY)
        if home is None and key is not None and request.method == "POST":
            home = home_of(f"key {key}", self._affinity.ranks)
        if home is not None:
            return await self._forwarder.pass_on(request, home, body, content=one.content)
        answer = await self._anywhere(request, one, "train" if train else "eval")
        return await self._replies.whole(request, answer.status, answer.headers, answer.body)

    async def _anywhere(
        self, request: web.BaseRequest, one: BodyFields, mode: str
    ) -> UpstreamResponse:
        """Each rank in turn; if none has a slot, one of them for as long as the caller waits."""
        wait = seconds(one.get("wait"))
        if wait is None:
            # Not a number: any rank says so.
            wait = 0.0
        deadline = time.monotonic() + wait
        give_up = time.monotonic() + self._ranks.wait
        first, first_target = (one.content, None) if not wait else _waiting(request, one, 0)
        self._turns[mode] += 1
        turn = self._turns[mode]
        while True:
            live = await self._ranks.reach_any(give_up)
            order = [live[(turn + k) % len(live)] for k in range(len(live))]
            full: list[int] = []
            refusal: UpstreamResponse | None = None
            for rank in order:
                answer = await self._ask(request, rank, first, first_target)
                if answer is None:
                    continue
                if answer.status == 429:
                    full.append(rank)
                elif not not_begun(answer):
                    return answer
                if answer.status == 429 or refusal is None:
                    # A slot can be waited for.
                    refusal = answer
            if refusal is None:
                # All of them went away; wait for one.
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not full:
                return refusal
            answer = await self._queue(request, one, self._shortest(full), remaining)
            if answer is not None:
                return answer

    async def _queue(
        self, request: web.BaseRequest, one: BodyFields, rank: int, wait: float
    ) -> UpstreamResponse | None:
        content, target = _waiting(request, one, round(wait, 3))
        self._queued[rank] += 1
        try:
            return await self._ask(request, rank, content, target)
        finally:
            self._queued[rank] -= 1

    def _shortest(self, ranks: list[int]) -> int:
        """The rank where the fewest wait. What it said of itself is up to a second old."""

        def waiting(rank: int) -> int:
            entry = self._ranks.entry(rank)
            return max(self._queued[rank], entry.load.waiting if entry else 0)

        return min(ranks, key=waiting)

    async def _ask(
        self, request: web.BaseRequest, rank: int, content: bytes, target: str | None
    ) -> UpstreamResponse | None:
        """A rank's answer; None if it is away."""
        try:
            return await self._forwarder.ask(request, rank, content=content or None, target=target)
        except ServiceUnavailable:
            return None


def _waiting(request: web.BaseRequest, one: BodyFields, wait: float) -> tuple[bytes, str]:
    """The body and the target of the same open with another `wait`."""
    content, target = one.asking(wait=wait)
    if request.method == "GET":
        return one.content, f"{target}{'&' if '?' in target else '?'}wait={wait}"
    return content, target


def not_begun(answer: UpstreamResponse) -> bool:
    """Whether a rank did not begin: after its other failures a session may be there.

    A write may reach the disk and fail to say so, and one open is to open one session.
    """
    return isinstance(from_response(answer.status, answer.body, None), StoreBusy | Draining)
