"""The rank of a request: read from its session key or id, or computed from its group's name.

There is no table of sessions, so a router that restarts, or a second one, decides alike.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from urllib.parse import parse_qsl

from aiohttp import hdrs
from multidict import CIMultiDictProxy, istr

from any_agent.errors import Conflict, InvalidRequest, NotFound, SessionMismatch
from any_agent.keys import (
    JUDGE_KEY_PREFIX,
    LANE_KEY_PREFIXES,
    SESSION_KEY_PREFIX,
    KeySigner,
    bearer_of,
    rank_of_session,
    session_prefix,
)

SESSION_HEADER = istr("X-Any-Agent-Session")
API_KEY_HEADER = istr("X-Api-Key")
SESSIONS_PATH = "/rl/v1/sessions/"
_MAX_CACHED_KEYS = 16_384
_MAX_FIELDS = 100  # fields of a query that is searched for a session; no route has as many


def home_of(name: str, ranks: int) -> int:
    """Return the rank of a group or task: rendezvous hashing over all ranks, dead or alive.

    An added rank moves only the groups that it wins; nothing else ever moves a group.
    """
    return max(range(ranks), key=lambda rank: (_weight(rank, name), rank))


def _weight(rank: int, name: str) -> bytes:
    return hashlib.blake2b(f"{rank}:{name}".encode("utf-8", "replace"), digest_size=8).digest()


class _Forged(Exception):
    """Reports a forged key; lru_cache does not store exceptions, so forged keys cannot fill it."""


class SessionAffinity:
    """Finds the ranks of sessions in a service with so many ranks."""

    def __init__(self, signer: KeySigner, ranks: int) -> None:
        self._signer = signer
        # An agent makes many calls under one key. Only genuine keys, which are short, are cached.
        self._rank_of_key = lru_cache(_MAX_CACHED_KEYS)(self._verified_rank)
        self.ranks = ranks

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
            try:
                rank = self._rank_of_key(name)
            except _Forged:
                return None
        else:
            rank = rank_of_session(name)
        if rank is not None and rank >= self.ranks:
            raise NotFound(
                f"the session is one of rank {rank}, and this service has the ranks 0 to "
                f"{self.ranks - 1}: it was opened at another service",
                code="unknown_rank",
            )
        return rank

    def _verified_rank(self, key: str) -> int:
        judge = key.startswith(JUDGE_KEY_PREFIX)
        lane = self._signer.verify(key, JUDGE_KEY_PREFIX if judge else SESSION_KEY_PREFIX)
        if lane is None:
            raise _Forged
        return lane.rank

    def home(self, *, api_key: str | None, group_id: str | None, task_id: str | None) -> int | None:
        """Return the rank that must open a session; None: any rank.

        Conflict (`lane_on_other_rank`) for an earlier key whose rank is not the group's home.
        """
        name = group_id or task_id
        home = home_of(name, self.ranks) if name else None
        if api_key is None:
            return home
        rank = self.rank_of(api_key) if api_key.startswith(SESSION_KEY_PREFIX) else None
        if rank is None:
            # The key is not valid, which any rank reports.
            return home
        if home is not None and home != rank:
            raise Conflict(
                f"the key belongs to rank {rank}, and sessions of this group or task live on rank "
                f"{home}; open without api_key",
                code="lane_on_other_rank",
            )
        return rank

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
    return bearer_of(headers.getall(hdrs.AUTHORIZATION, ()), headers.getall(API_KEY_HEADER, ()))
