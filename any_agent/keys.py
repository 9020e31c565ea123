"""The forms of keys.

::

    sk-v1.<rank>.<lane>.<hmac>   a session's: derived from the run's signing secret, never stored
    sk-admin.<id>.<secret>       made by `any-agent keys create`: their hashes are stored
    sk-trainer.<id>.<secret>     ... or, with "run" as id, the run's own, derived like a session's
    sk-tenant.<id>.<secret>

A session's key names a lane on a rank and nothing else, so a router can read the rank without a
table and a rank can check a key without one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from any_agent.errors import SessionMismatch

SESSION_KEY_PREFIX = "sk-v1."
KEPT_SCOPES = ("admin", "trainer", "tenant")
KEPT_PREFIXES = tuple(f"sk-{scope}." for scope in KEPT_SCOPES)
KEY_PREFIXES = (SESSION_KEY_PREFIX, *KEPT_PREFIXES)
"""What begins so is a key of ours, or a forged one."""
_RUN_KEY = "sk-trainer.run."
PLACEHOLDER_SESSION = f"{SESSION_KEY_PREFIX}placeholder"
"""No key, and good for nothing: stands in the base URL of agents that were to be given another."""
SESSION_ID_PREFIX = "ses-"
_KEY = re.compile(r"sk-v1\.(0|[1-9][0-9]{0,3})\.([0-9a-f]{24})\.([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Lane:
    """The identity behind a session key."""

    rank: int
    id: str


class KeySigner:
    """Mints and checks session keys.

    Of several secrets the first one signs, and all of them verify. ``secret`` may be a function
    that gives those of at most so many seconds ago: a running service learns of new ones by it.
    """

    def __init__(self, secret: bytes | Callable[[float | None], Sequence[bytes]]) -> None:
        self._secrets = secret if callable(secret) else lambda _: (secret,)

    def mint(self, rank: int) -> tuple[Lane, str]:
        """A new lane and its key."""
        lane = Lane(rank, secrets.token_hex(12))
        return lane, self.key_of(lane)

    def key_of(self, lane: Lane) -> str:
        """The key of a lane; the same one as long as the first secret is."""
        return next(self.keys_of(lane))

    def keys_of(self, lane: Lane) -> Iterator[str]:
        """The key of a lane by each secret."""
        for secret in self._secrets(None):
            yield f"{SESSION_KEY_PREFIX}{lane.rank}.{lane.id}.{_mac(secret, lane)}"

    def verify(self, key: str) -> Lane | None:
        """The lane of a genuine key; None for anything else."""
        lane = lane_in(key)
        if lane is None:
            return None
        mac = key.rpartition(".")[2]

        def genuine(secret: bytes) -> bool:
            return hmac.compare_digest(mac, _mac(secret, lane))

        return lane if self._any(genuine) else None

    @property
    def run_key(self) -> str:
        """The key of the run's own trainer and router: of scope trainer, and kept nowhere."""
        return _run_key(self._secrets(0.0)[0])

    def is_run_key(self, key: str) -> bool:
        """Whether a key is that one, by whichever secret."""
        if not key.startswith(_RUN_KEY):
            return False
        given = secret_hash(key)
        return self._any(lambda s: hmac.compare_digest(given, secret_hash(_run_key(s))))

    def _any(self, genuine: Callable[[bytes], bool]) -> bool:
        # Signed by a secret that is newer than the last look, perhaps.
        return any(map(genuine, self._secrets(None))) or any(map(genuine, self._secrets(0.0)))


def lane_in(key: str) -> Lane | None:
    """The lane that a session's key names, genuine or not; None for what has not its form."""
    match = _KEY.fullmatch(key)
    return None if match is None else Lane(int(match[1]), match[2])


def _mac(secret: bytes, lane: Lane) -> str:
    return hmac.digest(secret, f"v1.{lane.rank}.{lane.id}".encode(), "sha256").hex()[:32]


def _run_key(secret: bytes) -> str:
    mac = hmac.digest(secret, b"any-agent: the key of the run's own trainer and router", "sha256")
    return f"{_RUN_KEY}{mac.hex()}"


_KEPT_KEY = re.compile(r"sk-(admin|trainer|tenant)\.([0-9a-f]{8})\.([0-9a-f]{48})")


def new_key(scope: str) -> tuple[str, str]:
    """A new key of a kept scope, 192 random bits, and its id."""
    id = secrets.token_hex(4)
    return f"sk-{scope}.{id}.{secrets.token_hex(24)}", id


def key_id(key: str) -> str | None:
    """The id in a key of a kept scope's form; None for anything else."""
    match = _KEPT_KEY.fullmatch(key)
    return match[2] if match else None


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
    keys = bearers_of(authorization, x_api_key)
    if len(keys) > 1:
        raise SessionMismatch("the request carries two different keys")
    return keys.pop() if keys else ""


def bearers_of(authorization: Iterable[str], x_api_key: Iterable[str]) -> set[str]:
    """The keys in these headers' values, without empty ones."""
    found = [_BEARER.sub("", value).strip() for value in authorization]
    return {key for key in (*found, *x_api_key) if key}


class SecretHash:
    """A secret kept as its hash and compared in constant time."""

    def __init__(self, secret: str) -> None:
        self._digest = secret_hash(secret)

    def matches(self, candidate: str) -> bool:
        return hmac.compare_digest(self._digest, secret_hash(candidate))


def secret_hash(text: str) -> bytes:
    """Enough for what is random; a slow hash is for what people make up."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
