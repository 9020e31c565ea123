"""Session keys: ``sk-v1.<rank>.<lane>.<hmac>``, derived from one secret and never stored.

A key names a lane on a rank and nothing else, so a router can read the rank without a table and a
rank can check a key without one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from any_agent.errors import SessionMismatch

SESSION_KEY_PREFIX = "sk-v1."
SESSION_ID_PREFIX = "ses-"
_KEY = re.compile(r"sk-v1\.(0|[1-9][0-9]{0,3})\.([0-9a-f]{24})\.([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Lane:
    """The identity behind a session key."""

    rank: int
    id: str


class KeySigner:
    """Mints and checks session keys with one secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def mint(self, rank: int) -> tuple[Lane, str]:
        """A new lane and its key."""
        lane = Lane(rank, secrets.token_hex(12))
        return lane, self.key_of(lane)

    def key_of(self, lane: Lane) -> str:
        """The key of a lane; always the same one."""
        return f"{SESSION_KEY_PREFIX}{lane.rank}.{lane.id}.{self._mac(lane)}"

    def verify(self, key: str) -> Lane | None:
        """The lane of a genuine key; None for anything else."""
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        lane = Lane(int(match[1]), match[2])
        return lane if hmac.compare_digest(match[3], self._mac(lane)) else None

    def _mac(self, lane: Lane) -> str:
        message = f"v1.{lane.rank}.{lane.id}".encode()
        return hmac.digest(self._secret, message, "sha256").hex()[:32]


_SESSION_ID = re.compile(r"ses-(0|[1-9][0-9]{0,3})-[0-9a-f]{16}")
_NUMBERED_ID = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}-(0|[1-9][0-9]{0,3})-(?:0|[1-9][0-9]{0,9})"
)
"""`<task>-<rank>-<n>`, of sessions that were opened under the names of the AReaL documents."""


def rank_of_session(session_id: str) -> int | None:
    """The rank that a session's id names; None for what is no session id."""
    match = _SESSION_ID.fullmatch(session_id) or _NUMBERED_ID.fullmatch(session_id)
    return int(match[1]) if match else None


def session_prefix(path: str) -> str | None:
    """The key or id in a path `/{session}/...`, whose forms no route begins with."""
    first, slash, _ = path[1:].partition("/")
    if not slash or not path.startswith("/"):
        return None
    if first.startswith((SESSION_KEY_PREFIX, SESSION_ID_PREFIX)):
        return first
    return first if "-" in first and _NUMBERED_ID.fullmatch(first) else None


_BEARER = re.compile(r"^bearer(\s+|$)", re.IGNORECASE)


def bearer_of(authorization: Iterable[str], x_api_key: Iterable[str]) -> str:
    """The key in these headers' values, "" without one; SessionMismatch for two that differ."""
    found = [_BEARER.sub("", value).strip() for value in authorization]
    keys = {key for key in (*found, *x_api_key) if key}
    if len(keys) > 1:
        raise SessionMismatch("the request carries two different keys")
    return keys.pop() if keys else ""


class SecretHash:
    """A secret kept as its hash and compared in constant time."""

    def __init__(self, secret: str) -> None:
        self._digest = self._hash(secret)

    def matches(self, candidate: str) -> bool:
        return hmac.compare_digest(self._digest, self._hash(candidate))

    @staticmethod
    def _hash(text: str) -> bytes:
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
