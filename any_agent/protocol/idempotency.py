"""The meaning of `Idempotency-Key` at every service: its form, equal requests, turns and time.

A key belongs to its caller, method and path. Its request is identified by a hash of the body's JSON
(neither the order of fields nor white space matters), the query and the session's header; the same
key with another request is refused. Equal concurrent requests take turns: the first that succeeds
answers them all. Answers are kept for 24 hours of a clock that nobody can set; only over a reboot
of the machine it goes on with the wall clock.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

import orjson

from any_agent.errors import InvalidRequest, ServiceUnavailable, Unprocessable
from any_agent.runtime.boot_clock import clock_stamp, seconds_since

REPLAYED = "idempotent-replayed"
"""The header of an answer that was given before."""
ANSWER_TTL = 24 * 3600.0
SWEEP_INTERVAL = 600.0
MAX_WAITING = 1024  # requests that wait for an equal one, over all keys
MAX_WAIT = 330.0  # seconds: longer than any route but polls takes
_MAX_PARSED_BYTES = 1 << 20
"""Longer bodies are compared byte by byte, since sorting them would block the event loop."""
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


def idempotency_key(values: Iterable[str]) -> str | None:
    """Return the key in a request's values of the header, or None; InvalidRequest for a malformed
    one."""
    found = set(values)
    if not found:
        return None
    key = found.pop()
    if found or not _KEY.fullmatch(key):
        raise InvalidRequest(
            "Idempotency-Key must be a single text of 1 to 255 visible ASCII characters",
            code="bad_idempotency_key",
        )
    return key


def request_hash(query: bytes, sessions: Iterable[str], body: bytes) -> bytes:
    """Return a hash that equal requests share; ``sessions``: the values of the session's header."""
    # The route refuses a body that is not JSON or too deep, or ignores it.
    with suppress(orjson.JSONDecodeError, orjson.JSONEncodeError):
        if len(body) <= _MAX_PARSED_BYTES:
            body = orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)
    digest = hashlib.blake2b(digest_size=16)
    for part in (query, ",".join(sessions).encode("utf-8", "surrogateescape"), body):
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()


def other_request() -> Unprocessable:
    """Return the error of a key that was used for another request."""
    return Unprocessable(
        "this Idempotency-Key was used for another request; give every request its own key",
        code="idempotency_mismatch",
    )


class Turns:
    """Lets equal requests run one at a time."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """A lock by scope and key, while requests use it."""
        self.waiting = 0

    @asynccontextmanager
    async def turn(self, scope: str, key: str) -> AsyncIterator[None]:
        """Give a request its turn; ServiceUnavailable if equal ones take too long or are too
        many."""
        lock = self._locks.setdefault((scope, key), asyncio.Lock())
        await self._wait_for(lock)
        try:
            yield
        finally:
            lock.release()

    async def _wait_for(self, lock: asyncio.Lock) -> None:
        if not lock.locked():
            await lock.acquire()
            return
        busy = ServiceUnavailable(
            "an equal request with this Idempotency-Key is under way; send it again for the answer",
            code="idempotency_busy",
            retry_after=2,
        )
        if self.waiting >= MAX_WAITING:
            raise busy
        self.waiting += 1
        try:
            async with asyncio.timeout(MAX_WAIT):
                await lock.acquire()
        except TimeoutError:
            raise busy from None
        finally:
            self.waiting -= 1


class AnswerClock:
    """The clock of stored answers, in seconds: at its beginning it shows the wall clock's."""

    def __init__(self, kept: Sequence[Any] | None = None) -> None:
        """``kept``: the :attr:`state` after which it goes on."""
        self.state = _state_at(time.time())
        """Its time, with the boot clock's and the wall clock's, to be stored for a restart."""
        if kept is not None:
            at, stamp, wall = kept
            self.state = _state_at(at + seconds_since(stamp, wall))

    @property
    def now(self) -> float:
        at, stamp, wall = self.state
        return at + seconds_since(stamp, wall)


def _state_at(now: float) -> tuple[float, str, float]:
    return now, clock_stamp(), time.time()
