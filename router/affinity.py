"""The rank of a request: read from its session key or id, or computed from its group's name.

There is no table of sessions, so a router that restarts, or a second one, decides alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from urllib.parse import parse_qsl

from aiohttp import hdrs
from multidict import CIMultiDictProxy, istr

from any_agent.errors import Conflict, InvalidRequest, NotFound, SessionMismatch
from any_agent.keys import (
    JUDGE_KEY_PREFIX,
    KEY_HEADERS,
    LANE_KEY_PREFIXES,
    SESSION_KEY_PREFIX,
    KeySigner,
    bearer_of,
    rank_of_session,
    session_prefix,
)
from any_agent.rundir.fleet import Fleet

SESSION_HEADER = istr("X-Any-Agent-Session")
_KEY_HEADERS = tuple(map(istr, KEY_HEADERS))
SESSIONS_PATH = "/rl/v1/sessions/"
_MAX_FIELDS = 100  # fields of a query that is searched for a session; no route has as many


def home_of(name: str, ranks: Iterable[int]) -> int:
    """Return the rank of a group or task that begins: rendezvous hashing over the ranks that serve,
    dead or alive.

    An added rank wins some names from each other one, and those of a rank that goes are divided
    among the others; every other name keeps its home.
    """
    return max(ranks, key=lambda rank: (_weight(rank, name), rank))


def homes_of(name: str, fleet: Fleet) -> list[int]:
    """Return the ranks that may have a group or task: the homes at its birth under each set of
    ranks that served. It begins at the last one, the present home, unless another one has it.

    Most names have one home, because a change moves few of them.
    """
    *earlier, now = (home_of(name, ranks) for ranks in fleet.served)
    found = dict.fromkeys(rank for rank in earlier if rank != now and fleet.state(rank) is not None)
    return [*found, now]


def _weight(rank: int, name: str) -> bytes:
    return hashlib.blake2b(f"{rank}:{name}".encode("utf-8", "replace"), digest_size=8).digest()


class SessionAffinity:
    """Finds the ranks of sessions in the present ``fleet``."""

    def __init__(self, signer: KeySigner, fleet: Callable[[], Fleet]) -> None:
        self._signer = signer
        self._fleet = fleet

    def locate(
        self, path: str, query: str, headers: CIMultiDictProxy[str]
    ) -> tuple[int | None, bool, str]:
        """Return the rank of the session that a request names, whether it names one, and its key.

        The key is "" without one; behind a path prefix it is the prefix, which may be an id.

        The path prefix counts, else the key, the header, the query, or a session in the path. The
        rank is None as well for a forged key or a malformed id, which any rank refuses. NotFound
        (`unknown_rank`) for a key or id of a rank that this service does not have, SessionMismatch
        for two that live on different ranks, InvalidRequest for a query with too many fields.
        """
        named = [value for value in headers.getall(SESSION_HEADER, ()) if value]
        if "session_id" in query:
            if query.count("&") >= _MAX_FIELDS:
                # The sender is not checked yet, and thousands take tens of milliseconds to parse.
                raise InvalidRequest(f"the query has more than {_MAX_FIELDS} fields; send fewer")
            named += [value for key, value in parse_qsl(query) if key == "session_id"]
        prefix = session_prefix(path)
        if prefix is not None:
            # With a prefix other bearers ("DUMMY") mean nothing.
            return self._common_rank([prefix, *named]), True, prefix
        bearer = key_in(headers)
        if bearer.startswith(LANE_KEY_PREFIXES):
            named.append(bearer)
        if path.startswith(SESSIONS_PATH):
            named.append(path[len(SESSIONS_PATH) :].partition("/")[0])
        return self._common_rank(named), bool(named), bearer

    def rank_of(self, name: str) -> int | None:
        """Return the rank of a session key or id; None if it is neither. Errors as in `locate`."""
        rank: int | None
        if name.startswith(LANE_KEY_PREFIXES):
            judge = name.startswith(JUDGE_KEY_PREFIX)
            lane = self._signer.verify(name, JUDGE_KEY_PREFIX if judge else SESSION_KEY_PREFIX)
            rank = None if lane is None else lane.rank
        else:
            rank = rank_of_session(name)
        fleet = self._fleet()
        if rank is not None and fleet.state(rank) is None:
            why = "this service does not have: it was opened at another service"
            if fleet.knew(rank):
                why = "was drained: its sessions have ended"
            raise NotFound(f"the session is one of rank {rank}, which {why}", code="unknown_rank")
        return rank

    def homes(
        self, *, api_key: str | None, group_id: str | None, task_id: str | None
    ) -> list[int] | None:
        """Return the ranks that may have to open a session, as `homes_of` does; None: any rank.

        Conflict (`lane_on_other_rank`) for an earlier key whose rank is none of them.
        """
        name = group_id or task_id
        homes = homes_of(name, self._fleet()) if name else None
        if api_key is None:
            return homes
        rank = self.rank_of(api_key) if api_key.startswith(SESSION_KEY_PREFIX) else None
        if rank is None:
            # The key is not valid, which any rank reports.
            return homes
        if homes is not None and rank not in homes:
            raise Conflict(
                f"the key belongs to rank {rank}, and sessions of this group or task live on rank "
                f"{homes[-1]}; open without api_key",
                code="lane_on_other_rank",
            )
        return homes if homes is not None else [rank]

    def _common_rank(self, names: list[str]) -> int | None:
        if len(names) == 1:
            return self.rank_of(names[0])
        ranks = {rank for name in names if (rank := self.rank_of(name)) is not None}
        if len(ranks) > 1:
            raise SessionMismatch(
                "the request names two different sessions (path, key, header or query); name one"
            )
        return ranks.pop() if ranks else None


def key_in(headers: CIMultiDictProxy[str]) -> str:
    """Return a request's key, "" without one; SessionMismatch for two that differ."""
    plain = [value for name in _KEY_HEADERS for value in headers.getall(name, ())]
    return bearer_of(headers.getall(hdrs.AUTHORIZATION, ()), plain)
