"""`Idempotency-Key`: a repeated request gets the first answer, and has one effect.

A key belongs to its caller, method and path. Its request is identified by a hash of the body's JSON
(neither the order of fields nor white space matters), the query and the session's header; the same
key with another request is refused. Only successful answers are stored, each in the transaction of
its effect, so that a crash leaves both or neither. Equal concurrent requests take turns: the first
that succeeds answers them all.

Answers are kept for 24 hours of a clock that nobody can set; only over a reboot of the machine it
goes on with the wall clock. They are stored compressed, since their size grows with a session's
rewards. Leases and exports are not stored: they are long, and a repeated one answers the same to
its owner.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from any_agent.auth.access import Caller
from any_agent.errors import (
    Conflict,
    InvalidRequest,
    ServiceUnavailable,
    StoreUnavailable,
    Unprocessable,
)
from any_agent.keys import JUDGE_KEY_PREFIX, SESSION_KEY_PREFIX, KeySigner, Lane
from any_agent.runtime.boot_clock import clock_stamp, seconds_since
from proxy_ext.auth import SESSION_HEADER
from proxy_ext.journal import AnswerRow, DropAnswers, Journal, PutAnswer, PutMeta, Statement
from proxy_ext.journal.base import KeepAnswer, no_receipt

HEADER = "idempotency-key"
ANSWER_TTL = 24 * 3600.0
_CLOCK = "answers.clock"
SWEEP_INTERVAL = 600.0
MAX_WAITING = 1024  # requests that wait for an equal one, over all keys
MAX_WAIT = 330.0  # seconds: longer than any route but polls takes
_MAX_PARSED_BYTES = 1 << 20
"""Longer bodies are compared byte by byte, since sorting them would block the event loop."""
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_JSON = "application/json"


# An exception, as a FastAPI dependency cannot answer otherwise.
class ReplayedAnswer(Exception):
    """Answers a request with the stored ``response`` of an earlier one."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


def idempotency_key(request: Request) -> str | None:
    """Return the request's key, or None; InvalidRequest for a malformed one."""
    found = set(request.headers.getlist(HEADER))
    if not found:
        return None
    key = found.pop()
    if found or not _KEY.fullmatch(key):
        raise InvalidRequest(
            "Idempotency-Key must be a single text of 1 to 255 visible ASCII characters",
            code="bad_idempotency_key",
        )
    return key


def request_hash(request: Request, body: bytes) -> bytes:
    """Return a hash that equal requests share."""
    # The route refuses a body that is not JSON or too deep, or ignores it.
    with suppress(orjson.JSONDecodeError, orjson.JSONEncodeError):
        if len(body) <= _MAX_PARSED_BYTES:
            body = orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)
    digest = hashlib.blake2b(digest_size=16)
    named = ",".join(request.headers.getlist(SESSION_HEADER))
    for part in (request.url.query.encode(), named.encode("latin-1"), body):
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()


@dataclass(slots=True, eq=False)
class Receipt:
    """Lets a route answer a request once, whether it came with a key or not.

    A route passes ``keep`` to the function that makes the change, which commits its statements
    together with the change, and returns ``response(answer)``.
    """

    answers: IdempotencyStore
    scope: str = ""
    key: str | None = None
    hash: bytes = b""
    """The hash of the request."""
    _body: bytes | None = field(default=None, init=False, repr=False)

    @property
    def keep(self) -> KeepAnswer:
        """The callback that stores an answer; `no_receipt` for a request without a key."""
        return self._keep if self.key is not None else no_receipt

    def _keep(self, answer: BaseModel) -> tuple[Statement, ...]:
        assert self.key is not None
        self._body = _json(answer)
        body = self.answers.pack(answer)
        return (PutAnswer(self.scope, self.key, self.hash, 200, body, self.answers.now),)

    async def store(self, answer: BaseModel) -> Response:
        """Store and return the answer of a route that writes nothing itself.

        After a crash just before it a repeated request takes effect again, so this is only for
        effects that may happen twice.
        """
        if statements := self.keep(answer):
            await self.answers.journal.commit(*statements)
        return self.response(answer)

    def response(self, answer: BaseModel) -> Response:
        """Return the answer, byte for byte as it was stored."""
        return Response(self._body or _json(answer), media_type=_JSON)


class IdempotencyStore:
    """The stored answers of one rank. Keys of sessions and of their judges are not stored in them,
    but derived again."""

    def __init__(self, journal: Journal, signer: KeySigner) -> None:
        self.journal = journal
        self._signer = signer
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """A lock by scope and key, while requests use it: equal ones run one at a time."""
        self.waiting = 0
        self._swept = time.monotonic()
        self._clock = _clock_at(time.time())
        self.replayed = 0
        """Number of requests answered from the store."""

    @property
    def now(self) -> float:
        """The time of the answers' clock, in seconds: the wall clock's when the journal began."""
        at, stamp, wall = self._clock
        return at + seconds_since(stamp, wall)

    async def recover(self) -> None:
        """Continue the clock of the stored answers."""
        if (kept := await self.journal.meta(_CLOCK)) is not None:
            self._clock = kept
        self._clock = _clock_at(self.now)
        # Without space the earlier state stays, from which the next start computes the same.
        with suppress(StoreUnavailable):
            await self.journal.commit(PutMeta(_CLOCK, self._clock))

    @asynccontextmanager
    async def receipt(self, request: Request, caller: Caller) -> AsyncIterator[Receipt]:
        """Give the request its turn; ReplayedAnswer if it was answered already.

        InvalidRequest for a malformed key, Unprocessable (`idempotency_mismatch`) for the key of
        another request, ServiceUnavailable if equal ones take too long or are too many.
        """
        key = idempotency_key(request)
        if key is None:
            yield Receipt(self)
            return
        scope = f"{caller.identity} {request.method} {request.url.path}"
        hashed = request_hash(request, await request.body())
        async with self._turn(scope, key):
            row = await self.journal.answer(scope, key)
            if row is not None:
                raise ReplayedAnswer(self._replay(row, hashed))
            yield Receipt(self, scope, key, hashed)

    async def sweep(self) -> None:
        """Delete old answers, every ten minutes."""
        if time.monotonic() - self._swept >= SWEEP_INTERVAL:
            self._swept = time.monotonic()
            await self.journal.commit(DropAnswers(self.now - ANSWER_TTL))

    def _replay(self, row: AnswerRow, hashed: bytes) -> Response:
        if row.request_hash != hashed:
            raise Unprocessable(
                "this Idempotency-Key was used for another request; give every request its own key",
                code="idempotency_mismatch",
            )
        body = self.unpack(row.body)
        self.replayed += 1
        return Response(body, row.status, media_type=_JSON, headers={"idempotent-replayed": "true"})

    @asynccontextmanager
    async def _turn(self, scope: str, key: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault((scope, key), asyncio.Lock())
        await self._wait_for(turn)
        try:
            yield
        finally:
            turn.release()

    async def _wait_for(self, turn: asyncio.Lock) -> None:
        if not turn.locked():
            await turn.acquire()
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
                await turn.acquire()
        except TimeoutError:
            raise busy from None
        finally:
            self.waiting -= 1

    # -- stored form: "0" or "1" (with a sealed session key), and the compressed JSON --------------

    def pack(self, answer: BaseModel) -> bytes:
        """Return the stored form of an answer, without its session key."""
        data = answer.model_dump(mode="json")
        lane = self._signer.verify(data.get("api_key") or "")
        if lane is None:
            return b"0" + zlib.compress(orjson.dumps(data), 1)
        seal = {"rank": lane.rank, "lane": lane.id, "print": _fingerprint(data["api_key"])}
        if data.get("judge_key") is not None:
            data["judge_key"] = _fingerprint(data["judge_key"])
        return b"1" + zlib.compress(orjson.dumps(data | {"api_key": seal}), 1)

    def unpack(self, body: bytes) -> bytes:
        """Return the answer's JSON, byte for byte; Conflict if its key's secret is retired."""
        kind, content = body[:1], zlib.decompress(body[1:])
        if kind == b"0":
            return content
        data = orjson.loads(content)
        seal = data["api_key"]
        lane = Lane(seal["rank"], seal["lane"])
        data["api_key"] = self._key(lane, SESSION_KEY_PREFIX, seal["print"])
        if data.get("judge_key") is not None:
            data["judge_key"] = self._key(lane, JUDGE_KEY_PREFIX, data["judge_key"])
        return orjson.dumps(data)

    def _key(self, lane: Lane, prefix: str, fingerprint: str) -> str:
        for key in self._signer.keys_of(lane, prefix):
            if _fingerprint(key) == fingerprint:
                return key
        raise Conflict(
            "the session's key was signed with a secret that is retired; open another session with "
            "a new Idempotency-Key",
            code="key_retired",
        )


def _clock_at(now: float) -> tuple[float, str, float]:
    """Return the state of a clock that shows ``now``, with the boot clock and the wall clock."""
    return now, clock_stamp(), time.time()


def _json(answer: BaseModel) -> bytes:
    return orjson.dumps(answer.model_dump(mode="json"))


def _fingerprint(key: str) -> str:
    """Return a short hash that tells apart keys of one lane signed with different secrets."""
    return hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
