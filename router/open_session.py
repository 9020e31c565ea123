"""Routing of `start_session`: to the group's home, to the key's rank, else to a rank with a slot.

An open with an Idempotency-Key that nothing else binds to a rank goes to the key's home, like a
group, and to no other rank: only that one knows how it answered an earlier equal request.
"""

from __future__ import annotations

import time
from collections import Counter

from aiohttp import web

from any_agent.errors import Draining, ServiceUnavailable, StoreBusy, from_response
from router.affinity import SessionAffinity, home_of
from router.body import BodyFields, RequestBody, seconds
from router.forward import IDEMPOTENCY_KEY, Forwarder
from router.upstream import UpstreamResponse

START = "/rl/v1/start_session"
MAX_BYTES = 1 << 20  # size of the bodies of `/rl` routes that the router reads


class OpenRoute:
    """Opens sessions for agents."""

    def __init__(self, affinity: SessionAffinity, forwarder: Forwarder) -> None:
        self._affinity = affinity
        self._ranks = forwarder.ranks
        self._forwarder = forwarder
        self._turns: Counter[str] = Counter()
        self._queued: Counter[int] = Counter()
        """Number of opens that this router lets wait for a slot, by rank."""

    async def open(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """Answer as the rank that opened the session, or as the last one that could not."""
        fields = BodyFields(request, await body.read(MAX_BYTES))
        if fields.body is None:
            return await self._forwarder.pass_on(request, None, body, content=fields.content)
        train = fields.text("mode") != "eval"
        home = self._affinity.home(
            api_key=fields.text("api_key"),
            group_id=fields.text("group_id") if train else None,
            task_id=fields.text("task_id") if train else None,
        )
        key = request.headers.get(IDEMPOTENCY_KEY)
        if home is None and key is not None and request.method == "POST":
            home = home_of(f"key {key}", self._affinity.ranks)
        if home is not None:
            return await self._forwarder.pass_on(request, home, body, content=fields.content)
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
        while True:
            live = await self._ranks.reach_any(give_up)
            full: list[int] = []
            refusal: UpstreamResponse | None = None
            for k in range(len(live)):
                rank = live[(turn + k) % len(live)]
                answer = await self._ask(request, rank, *at_once)
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
                answer = await self._ask(request, rank, *waiting)
            finally:
                self._queued[rank] -= 1
            if answer is not None:
                return answer

    def _waiting_at(self, rank: int) -> int:
        """Return how many opens wait at a rank; its own number is up to a second old."""
        entry = self._ranks.entry(rank)
        return max(self._queued[rank], entry.load.waiting if entry else 0)

    async def _ask(
        self, request: web.BaseRequest, rank: int, content: bytes, target: str | None
    ) -> UpstreamResponse | None:
        """Return a rank's answer; None if it is away."""
        try:
            return await self._forwarder.ask(request, rank, content=content, target=target)
        except ServiceUnavailable:
            return None


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
    return isinstance(from_response(answer.status, answer.body, None), StoreBusy | Draining)
