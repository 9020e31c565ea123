"""API keys: their forms, their signatures, and the ids of sessions.

::

    sk-v1.<rank>.<lane>.<hmac>   a session's key, derived from the run's signing secret, not stored
    sk-judge.<rank>.<lane>.<hmac>   the key of its judge, derived likewise: it can only reward it
    sk-admin.<id>.<secret>       created by `any-agent keys create`, stored as a hash
    sk-trainer.<id>.<secret>     the same; with "run" as id the run's own key, derived, not stored
    sk-tenant.<id>.<secret>      created by `any-agent keys create`, stored as a hash
    sk-engine.<hmac>             the key of a run's engines, derived, in a file for their clients
    sk-metrics.<hmac>            the key of the trainer's metrics, derived, not stored

A session's key names a lane on a rank and nothing else, so that a router reads the rank, and a rank
checks the key, without a table.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

from any_agent.errors import SessionMismatch

SESSION_KEY_PREFIX = "sk-v1."
JUDGE_KEY_PREFIX = "sk-judge."
LANE_KEY_PREFIXES = (SESSION_KEY_PREFIX, JUDGE_KEY_PREFIX)
KEPT_SCOPES = ("admin", "trainer", "tenant")
KEPT_PREFIXES = tuple(f"sk-{scope}." for scope in KEPT_SCOPES)
_ENGINE_KEY = "sk-engine."
_METRICS_KEY = "sk-metrics."
KEY_PREFIXES = (*LANE_KEY_PREFIXES, *KEPT_PREFIXES, _ENGINE_KEY, _METRICS_KEY)
"""Prefixes of all keys of this service, genuine or forged."""
_RUN_KEY = "sk-trainer.run."
_PURPOSES = {
    _RUN_KEY: b"any-agent: the key of the run's own trainer and router",
    _METRICS_KEY: b"any-agent: the key of the trainer's metrics",
    _ENGINE_KEY: b"any-agent: the key of the run's engines",
}
"""The texts that derive the keys with these prefixes from a secret."""
PLACEHOLDER_SESSION = f"{SESSION_KEY_PREFIX}placeholder"
"""A text in the place of a key, in the base URL of agents that must be given another one."""
SESSION_KEYS = ("ANY_AGENT_API_KEY", "OPENAI_API_KEY")
"""Variables with the key that opens sessions, a tenant's; the first one that is set counts."""
OPERATOR_KEYS = ("ANY_AGENT_KEY", "ANY_AGENT_SERVER__ADMIN_KEY", *SESSION_KEYS)
"""Variables with the key of commands that look at a service or change it: an operator's own, else
that which opens sessions."""
SESSION_ID_PREFIX = "ses-"
_LANE_DIGITS = 24
TAG_DIGITS = 8
"""The length of `server.lane_tag`, with which the lanes of a service of several runs begin."""
_KEY = re.compile(r"sk-(?:v1|judge)\.(0|[1-9][0-9]{0,3})\.([0-9a-f]{24})\.([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Lane:
    """The identity behind a session key."""

    rank: int
    id: str


class KeySigner:
    """Mints and checks session keys.

    The first of several secrets signs, and all of them verify. ``secret`` may be a function that
    returns the secrets as they were at most so many seconds ago, so that a running service follows
    rotations.
    """

    def __init__(
        self, secret: bytes | Callable[[float | None], Sequence[bytes]], tag: str = ""
    ) -> None:
        """``tag``: hexadecimal digits with which new lanes begin, to be read in their keys."""
        self._tag = tag
        self._secrets = secret if callable(secret) else lambda _: (secret,)

    def mint(self, rank: int) -> tuple[Lane, str]:
        """Return a new lane and its key."""
        lane = Lane(rank, f"{self._tag}{secrets.token_hex(12)}"[:_LANE_DIGITS])
        return lane, self.key_of(lane)

    def key_of(self, lane: Lane, prefix: str = SESSION_KEY_PREFIX) -> str:
        """Return the key of a lane, or of its judge, by the first secret."""
        return next(self.keys_of(lane, prefix))

    def keys_of(self, lane: Lane, prefix: str = SESSION_KEY_PREFIX) -> Iterator[str]:
        """Yield the key of a lane, or of its judge, by each secret."""
        for secret in self._secrets(None):
            yield f"{prefix}{lane.rank}.{lane.id}.{_mac(secret, lane, prefix)}"

    def verify(self, key: str, prefix: str = SESSION_KEY_PREFIX) -> Lane | None:
        """Return the lane of a genuine key with this prefix; None for any other text."""
        if not key.startswith(prefix):
            return None
        # The second try reads the secrets anew: one may have been added.
        for within in (None, 0.0):
            with suppress(_Forged):
                return _genuine_lane(key, prefix, tuple(self._secrets(within)))
        return None

    @property
    def run_key(self) -> str:
        """The key of the run's own trainer and router, of scope trainer; it is stored nowhere."""
        return _derived(_RUN_KEY, self._secrets(0.0)[0])

    def is_run_key(self, key: str) -> bool:
        """Return True if the key is the run key by one of the secrets."""
        return self._is_derived(_RUN_KEY, key)

    @property
    def metrics_key(self) -> str:
        """The key that opens the trainer's metrics and nothing else.

        A trainer's port is its own, so another program may have the port of a dead one.
        """
        return _derived(_METRICS_KEY, self._secrets(0.0)[0])

    def is_metrics_key(self, key: str) -> bool:
        """Return True if the key is that of the trainer's metrics by one of the secrets."""
        return self._is_derived(_METRICS_KEY, key)

    def sign_client(self, address: str) -> str:
        """Return the address of a router's client in a form that a rank believes."""
        return f"{address} {_client_mac(self._secrets(None)[0], address)}"

    def client_in(self, signed: str) -> str | None:
        """Return the address that a router of this run has signed; None for any other text."""
        address, _, mac = signed.partition(" ")
        given = mac.encode("utf-8", "surrogatepass")

        def genuine(secret: bytes) -> bool:
            return hmac.compare_digest(given, _client_mac(secret, address).encode())

        return address if self._any(genuine) else None

    def _is_derived(self, prefix: str, key: str) -> bool:
        if not key.startswith(prefix):
            return False
        given = secret_hash(key)
        return self._any(lambda s: hmac.compare_digest(given, secret_hash(_derived(prefix, s))))

    def _any(self, genuine: Callable[[bytes], bool]) -> bool:
        # The second try reads the secrets anew: one may have been added.
        return any(map(genuine, self._secrets(None))) or any(map(genuine, self._secrets(0.0)))


def lane_in(key: str) -> Lane | None:
    """Return the lane that a session's or judge's key names, genuine or not; None for another
    form."""
    match = _KEY.fullmatch(key)
    return None if match is None else Lane(int(match[1]), match[2])


class _Forged(Exception):
    """Reports a forged key; lru_cache does not store exceptions, so forged keys cannot fill it."""


@lru_cache(maxsize=16_384)
def _genuine_lane(key: str, prefix: str, signers: tuple[bytes, ...]) -> Lane:
    """Return the lane of a key that one of the secrets has signed; _Forged for any other text.

    An agent makes many calls under one key. Genuine keys, which alone are cached, are short.
    """
    lane, mac = lane_in(key), key.rpartition(".")[2]
    if lane is None or not any(hmac.compare_digest(mac, _mac(s, lane, prefix)) for s in signers):
        raise _Forged
    return lane


def _mac(secret: bytes, lane: Lane, prefix: str) -> str:
    text = f"{prefix.removeprefix('sk-')}{lane.rank}.{lane.id}"
    return hmac.digest(secret, text.encode(), "sha256").hex()[:32]


def _derived(prefix: str, secret: bytes) -> str:
    return f"{prefix}{hmac.digest(secret, _PURPOSES[prefix], 'sha256').hex()}"


@lru_cache(maxsize=4096)
def _client_mac(secret: bytes, address: str) -> str:
    text = f"any-agent: a client of the router at {address}"
    return hmac.digest(secret, text.encode("utf-8", "surrogatepass"), "sha256").hex()[:32]


def engine_key(secret: bytes) -> str:
    """Return the key of engines whose run has this secret."""
    return _derived(_ENGINE_KEY, secret)


_KEPT_KEY = re.compile(r"sk-(admin|trainer|tenant)\.([0-9a-f]{8})\.([0-9a-f]{48})")


def new_key(scope: str) -> tuple[str, str]:
    """Return a new key of a stored scope, with 192 random bits, and its id."""
    id = secrets.token_hex(4)
    return f"sk-{scope}.{id}.{secrets.token_hex(24)}", id


def key_id(key: str) -> str | None:
    """Return the id in a key that has the form of a stored one; None for any other text."""
    match = _KEPT_KEY.fullmatch(key)
    return match[2] if match else None


_SESSION_ID = re.compile(r"ses-(0|[1-9][0-9]{0,3})-([0-9a-f]{8})?[0-9a-f]{16}")
_NUMBERED_ID = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}-(0|[1-9][0-9]{0,3})-(?:0|[1-9][0-9]{0,9})"
)
"""`<task>-<rank>-<n>`: ids of sessions that were opened by AReaL's routes."""


def rank_of_session(session_id: str) -> int | None:
    """Return the rank that a session's id names; None for any other text."""
    match = _SESSION_ID.fullmatch(session_id) or _NUMBERED_ID.fullmatch(session_id)
    return int(match[1]) if match else None


def tag_of_session(session_id: str) -> str | None:
    """Return the `server.lane_tag` of the run that a session's id names; None for an id without."""
    match = _SESSION_ID.fullmatch(session_id)
    return match[2] if match else None


def session_prefix(path: str) -> str | None:
    """Return the session's key or id in a path `/{session}/...`; None without one."""
    first, slash, _ = path[1:].partition("/")
    if not slash or not path.startswith("/"):
        return None
    if first.startswith((SESSION_KEY_PREFIX, SESSION_ID_PREFIX)):
        return first
    return first if "-" in first and _NUMBERED_ID.fullmatch(first) else None


_BEARER = re.compile(r"^bearer(\s+|$)", re.IGNORECASE)


KEY_HEADERS = ("x-api-key", "api-key")
"""The headers that have a key alone: those of Anthropic's clients and of Azure's."""


def bearer_of(authorization: Iterable[str], plain: Iterable[str]) -> str:
    """Return the key in the values of `Authorization` and of :data:`KEY_HEADERS`, "" without one.

    SessionMismatch for several.
    """
    keys = bearers_of(authorization, plain)
    if len(keys) > 1:
        raise SessionMismatch("the request carries two different keys")
    return keys.pop() if keys else ""


def bearers_of(authorization: Iterable[str], plain: Iterable[str]) -> set[str]:
    """Return the non-empty keys in the values of `Authorization` and of :data:`KEY_HEADERS`."""
    found = [_BEARER.sub("", value).strip() for value in authorization]
    return {key for key in (*found, *plain) if key}


class SecretHash:
    """A secret that is stored as its hash and compared in constant time."""

    def __init__(self, secret: str) -> None:
        self._digest = secret_hash(secret)

    def matches(self, candidate: str) -> bool:
        return hmac.compare_digest(self._digest, secret_hash(candidate))


def secret_hash(text: str) -> bytes:
    """Return a fast hash, which suits random secrets; passwords would need a slow one."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def operator_key(given: str | None) -> tuple[str | None, str]:
    """Return the key of a command, ``given`` by ``--key`` or in the environment, and its source."""
    if given:
        return given, "--key"
    for name in OPERATOR_KEYS:
        key = os.environ.get(name)
        # This variable may hold another provider's key, which the service must not see.
        foreign = name == "OPENAI_API_KEY" and not (key or "").startswith(KEPT_PREFIXES)
        if key and not foreign:
            return key, name
    return None, ""
