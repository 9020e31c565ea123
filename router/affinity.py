"""Which rank a request belongs to: read from its key or id, computed from its group's name.

No table tells it, so a router that restarts, or a second one, decides alike.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from urllib.parse import parse_qsl

from aiohttp import hdrs
from multidict import CIMultiDictProxy, istr

from any_agent.errors import Conflict, InvalidRequest, NotFound, SessionMismatch
from any_agent.keys import (
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
_MAX_FIELDS = 100
"""Of a query that is looked through; no route has as many."""


def home_of(name: str, ranks: int) -> int:
    """The rank of a group (or task): rendezvous hashing, over all ranks, dead or alive.

    Adding a rank moves only the groups that it wins; nothing else ever moves one.
    """
    return max(range(ranks), key=lambda rank: (_weight(rank, name), rank))


def _weight(rank: int, name: str) -> bytes:
    return hashlib.blake2b(f"{rank}:{name}".encode("utf-8", "replace"), digest_size=8).digest()


class _Forged(Exception):
    """What is raised is not remembered: forged keys must not fill the cache."""


class SessionAffinity:
    """The rules of one service: its secret, and how many ranks it has."""

    def __init__(self, signer: KeySigner, ranks: int) -> None:
        self._signer = signer
        # An agent makes many calls under one key. Only genuine keys, which are short, are kept.
        self._rank_of_key = lru_cache(_MAX_CACHED_KEYS)(self._checked)
        self.ranks = ranks

    def place(
        self, path: str, query: str, headers: CIMultiDictProxy[str]
    ) -> tuple[int | None, bool]:
        """The rank of the session that a request names, and whether it names one at all.

        Path prefix, else key, else header, else query, else a session in the path. The rank is
        None, too, for a forged key, and an id whose form tells none: whichever rank is asked, it
        says so. NotFound (`unknown_rank`) for a key or id of a rank that this service does not
        have, SessionMismatch for two that live on different ranks, InvalidRequest for a query with
        too many fields.
        """
        named = [value for value in headers.getall(SESSION_HEADER, ()) if value]
        if "session_id" in query:
            if query.count("&") >= _MAX_FIELDS:
                # Nobody is known yet, and thousands of them take tens of milliseconds.
                raise InvalidRequest(f"the query has more than {_MAX_FIELDS} fields")
            named += [value for key, value in parse_qsl(query) if key == "session_id"]
        prefix = session_prefix(path)
        if prefix is not None:
            # Behind a prefix other bearers ("DUMMY") mean nothing.
            return self._one_of([prefix, *named]), True
        bearer = key_in(headers)
        if bearer.startswith(SESSION_KEY_PREFIX):
            named.append(bearer)
        if path.startswith(SESSIONS_PATH):
            named.append(path[len(SESSIONS_PATH) :].partition("/")[0])
        return self._one_of(named), bool(named)

    def rank_of(self, name: str) -> int | None:
        """The rank of a session key or id; None for what is neither. Errors as for `place`."""
        if name.startswith(SESSION_KEY_PREFIX):
            rank = self._rank_of_any_key(name)
        else:
            rank = rank_of_session(name)
        if rank is not None and rank >= self.ranks:
            raise NotFound(
                f"the session is one of rank {rank}, and this service has the ranks 0 to "
                f"{self.ranks - 1}: it was opened at another service",
                code="unknown_rank",
            )
        return rank

    def _rank_of_any_key(self, key: str) -> int | None:
        try:
            return self._rank_of_key(key)
        except _Forged:
            return None

    def _checked(self, key: str) -> int:
        lane = self._signer.verify(key)
        if lane is None:
            raise _Forged
        return lane.rank

    def home(self, *, api_key: str | None, group_id: str | None, task_id: str | None) -> int | None:
        """Where a session must be opened; None: anywhere.

        Conflict (`lane_on_other_rank`) for an earlier key whose rank is not the group's home.
        """
        name = group_id or task_id
        home = home_of(name, self.ranks) if name else None
        if api_key is None:
            return home
        rank = self.rank_of(api_key) if api_key.startswith(SESSION_KEY_PREFIX) else None
        if rank is None:
            # Its rank would say what is wrong with it; any rank does.
            return home
        if home is not None and home != rank:
            raise Conflict(
                f"the key belongs to rank {rank}, and sessions of this group or task live on rank "
                f"{home}; open without api_key",
                code="lane_on_other_rank",
            )
        return rank

    def _one_of(self, names: list[str]) -> int | None:
        if len(names) == 1:
            return self.rank_of(names[0])
        ranks = {rank for name in names if (rank := self.rank_of(name)) is not None}
        if len(ranks) > 1:
            raise SessionMismatch(
                "the request names two different sessions (path, key, header or query)"
            )
        return ranks.pop() if ranks else None


def key_in(headers: CIMultiDictProxy[str]) -> str:
    """The key that a request comes with, "" without one; SessionMismatch for two that differ."""
    return bearer_of(headers.getall(hdrs.AUTHORIZATION, ()), headers.getall(API_KEY_HEADER, ()))
