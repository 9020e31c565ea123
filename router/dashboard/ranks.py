"""Reads from ranks with a visitor's own key, so that each rank judges what the visitor may see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from typing import Any
from urllib.parse import quote, urlencode

import orjson
from aiohttp import hdrs
from multidict import CIMultiDict, istr

from any_agent.auth.access import CLIENT_HEADER
from any_agent.errors import AnyAgentError, NotFound, ServiceUnavailable
from any_agent.keys import KeySigner
from router.affinity import SessionAffinity
from router.fanout import merged_sessions, refusal_of
from router.forward import Forwarder
from router.upstream import UpstreamResponse

_TIMEOUT = 5.0
_GLANCE_TIMEOUT = 2.0  # of the overview, which must say soon that a rank hangs
_CLIENT = istr(CLIENT_HEADER)


@dataclass(frozen=True, slots=True)
class Visitor:
    """The person who looks at a page."""

    key: str
    """The visitor's key; "" in a service without keys."""
    name: str
    tenant: str | None
    address: str

    @property
    def operates(self) -> bool:
        """True for the operator, who sees the whole run."""
        return self.tenant is None


@dataclass(frozen=True, slots=True)
class SessionsPage:
    """Sessions of all ranks that answered."""

    sessions: list[dict[str, Any]]
    after: str
    """The start of the next page; "": this is the last one."""
    missing: list[int]
    """The ranks whose sessions are missing here."""


def reward_unknown(info: Mapping[str, Any]) -> bool:
    """Return whether a session's rewards may have left the journal with its content."""
    return info["reward"] is None and info["content"] != "stored"


class Refused(AnyAgentError):
    """The refusal of a rank, with the rank's own words."""

    rank_status = 502


class RankReader:
    """Asks ranks on behalf of visitors. A rank that is away is not waited for."""

    def __init__(self, forwarder: Forwarder, affinity: SessionAffinity, signer: KeySigner) -> None:
        self._forwarder = forwarder
        self._affinity = affinity
        self._signer = signer
        self.clocks: dict[int, float] = {}
        """Seconds by which each rank's clock was ahead of ours when it answered last."""

    async def of_session(
        self, visitor: Visitor, session_id: str, rest: str = "", **query: object
    ) -> dict[str, Any]:
        """Return what a session's rank says about it.

        NotFound for an unknown one and another tenant's, ServiceUnavailable if the rank is away,
        Refused with the rank's words.
        """
        rank = self._affinity.rank_of(session_id) if not session_id.startswith("sk-") else None
        if rank is None:
            raise NotFound(f"there is no session {session_id[:80]}", code="session_not_found")
        target = f"/rl/v1/sessions/{quote(session_id, safe='')}{rest}"
        answer = await self._ask(visitor, rank, target, query)
        if answer is None:
            raise ServiceUnavailable(
                f"rank {rank}, which has this session, does not answer; try again", retry_after=5
            )
        return _checked(answer)

    async def sessions(self, visitor: Visitor, query: Mapping[str, str]) -> SessionsPage:
        """Return a page of sessions. Refused for a query that the ranks refuse."""
        answers = await self._ask_all(visitor, "/rl/v1/sessions", query)
        found, after = merged_sessions(answers, query)
        lists = [rank for rank, answer in answers.items() if answer.status < 300]
        missing = sorted(set(self._forwarder.ranks.fleet.ranks) - set(lists))
        return SessionsPage(found, after or "", missing)

    async def capacity(self, visitor: Visitor) -> dict[int, dict[str, Any]]:
        """Return the slots of each rank that answers."""
        answers = await self._ask_all(
            visitor, "/rl/v1/capacity", {}, required=False, within=_GLANCE_TIMEOUT
        )
        found = {}
        for rank, answer in answers.items():
            with suppress(AnyAgentError):
                found[rank] = _checked(answer)
        return found

    async def _ask_all(
        self,
        visitor: Visitor,
        target: str,
        query: Mapping[str, str],
        *,
        required: bool = True,
        within: float = _TIMEOUT,
    ) -> dict[int, UpstreamResponse]:
        asked = self._forwarder.ranks.live
        came = await asyncio.gather(
            *(self._ask(visitor, rank, target, query, within) for rank in asked)
        )
        answers = {answer.rank: answer for answer in came if answer is not None}
        if required:
            if not answers:
                raise ServiceUnavailable("no rank of the service answers; try again", retry_after=5)
            if (refusal := refusal_of(answers)) is not None:
                _checked(refusal)
        return answers

    async def _ask(
        self,
        visitor: Visitor,
        rank: int,
        target: str,
        query: Mapping[str, object],
        within: float = _TIMEOUT,
    ) -> UpstreamResponse | None:
        """Return a rank's answer; None if it does not answer in time."""
        headers: CIMultiDict[str] = CIMultiDict()
        if visitor.key:
            headers[hdrs.AUTHORIZATION] = f"Bearer {visitor.key}"
        headers[_CLIENT] = self._signer.sign_client(visitor.address)
        if query:
            target = f"{target}?{urlencode(query)}"
        try:
            async with asyncio.timeout(within):
                answer = await self._forwarder.exchange(rank, "GET", target, headers, b"")
        except (AnyAgentError, TimeoutError):
            return None
        self.clocks[rank] = _ahead(answer.headers.get(hdrs.DATE, ""))
        return answer


def _ahead(date: str) -> float:
    """Return the seconds by which a date of HTTP is ahead of our clock; 0 if it is none."""
    parsed = parsedate_tz(date)
    return mktime_tz(parsed) - time.time() if parsed is not None else 0.0


def _checked(answer: UpstreamResponse) -> dict[str, Any]:
    """Return an answer's JSON object; Refused for an error."""
    try:
        data = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        data = None
    if answer.status < 300 and isinstance(data, dict):
        return data
    error = data.get("error") if isinstance(data, dict) else None
    if not isinstance(error, dict):
        raise ServiceUnavailable(f"rank {answer.rank} failed; its log has the reason")
    refused = Refused(str(error.get("message", "")), code=str(error.get("code", "refused")))
    refused.rank_status = answer.status
    raise refused
