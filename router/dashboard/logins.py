"""Browsers that are logged in. They live in this process: after its restart people log in again."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from any_agent.errors import TooManyRequests

LIFETIME = 12 * 3600.0
"""Seconds for which a login lasts."""
MAX_LOGINS = 1024
_MAX_PER_KEY = 8
_MAX_FAILURES = 5  # wrong keys from one address in a minute
_WINDOW = 60.0
MAX_ADDRESSES = 4096


@dataclass(frozen=True, slots=True)
class Login:
    """One browser that is logged in."""

    key: str
    """The key that it logged in with: each read of a rank is made with it."""
    identity: str
    """The key's holder, of whom only the newest logins are kept."""
    expires: float


class Logins:
    """The logins by the token in a browser's cookie, of which only a digest is kept."""

    def __init__(self) -> None:
        self._by_token: OrderedDict[bytes, Login] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_token)

    def begin(self, key: str, identity: str) -> str:
        """Return the token of a new login. Beyond the limits the oldest one ends."""
        self._drop_expired()
        own = [token for token, login in self._by_token.items() if login.identity == identity]
        if len(own) >= _MAX_PER_KEY:
            del self._by_token[own[0]]
        elif len(self._by_token) >= MAX_LOGINS:
            self._by_token.popitem(last=False)
        token = secrets.token_urlsafe(32)
        self._by_token[_digest(token)] = Login(key, identity, time.monotonic() + LIFETIME)
        return token

    def find(self, token: str) -> Login | None:
        """Return the login of a token; None for one that is unknown or expired."""
        self._drop_expired()
        return self._by_token.get(_digest(token))

    def end(self, token: str) -> None:
        self._by_token.pop(_digest(token), None)

    def _drop_expired(self) -> None:
        # All last equally long, so that the oldest one is the first to expire.
        now = time.monotonic()
        while self._by_token and next(iter(self._by_token.values())).expires <= now:
            self._by_token.popitem(last=False)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


class FailureLimit:
    """Bounds the wrong keys that one address may send in a minute."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str) -> None:
        """Raise TooManyRequests for an address that has sent too many wrong keys."""
        failures = self._at.get(_network(address))
        now = time.monotonic()
        if failures and len(failures) >= _MAX_FAILURES and now - failures[0] < _WINDOW:
            raise TooManyRequests(
                f"{_MAX_FAILURES} wrong keys came from this address; wait a minute, and try again",
                code="too_many_logins",
                retry_after=_WINDOW - (now - failures[0]),
            )

    def count(self, address: str) -> None:
        """Count a wrong key."""
        network = _network(address)
        failures = self._at.setdefault(network, deque(maxlen=_MAX_FAILURES))
        failures.append(time.monotonic())
        self._at.move_to_end(network)
        if len(self._at) > MAX_ADDRESSES:
            self._at.popitem(last=False)


def _network(address: str) -> str:
    """Return the address, or the network of one of version 6, whose hosts one person may own."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False))
