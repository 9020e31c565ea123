"""`Idempotency-Key` at the routes of a rank: a repeated request gets the first answer, and has one
effect.

`any_agent.protocol.idempotency` says which requests are equal. Only successful answers are stored,
each in the transaction of its effect, so that a crash leaves both or neither. They are stored
compressed, since their size grows with a session's rewards. Leases and exports are not stored: they
are long, and a repeated one answers the same to its owner.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from any_agent.auth.access import Caller
from any_agent.errors import Conflict, StoreUnavailable
from any_agent.keys import JUDGE_KEY_PREFIX, SESSION_KEY_PREFIX, KeySigner, Lane
from any_agent.protocol import idempotency
from any_agent.protocol.idempotency import (
    ANSWER_TTL,
    REPLAYED,
    AnswerClock,
    Turns,
    idempotency_key,
    other_request,
    request_hash,
)
from any_agent.protocol.rl import IDEMPOTENCY_KEY
from proxy_ext.auth import SESSION_HEADER
from proxy_ext.journal import AnswerRow, DropAnswers, Journal, PutAnswer, PutMeta, Statement
from proxy_ext.journal.base import KeepAnswer, no_receipt

_CLOCK = "answers.clock"
_JSON = "application/json"


# An exception, as a FastAPI dependency cannot answer otherwise.
class ReplayedAnswer(Exception):
    """Answers a request with the stored ``response`` of an earlier one."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


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
        self.turns = Turns()
        self._swept = time.monotonic()
        self._clock = AnswerClock()
        self.replayed = 0
        """Number of requests answered from the store."""

    @property
    def now(self) -> float:
        """The time of the answers' clock, in seconds: the wall clock's when the journal began."""
        return self._clock.now

    async def recover(self) -> None:
        """Continue the clock of the stored answers."""
        self._clock = AnswerClock(await self.journal.meta(_CLOCK))
        # Without space the earlier state stays, from which the next start computes the same.
        with suppress(StoreUnavailable):
            await self.journal.commit(PutMeta(_CLOCK, self._clock.state))

    @asynccontextmanager
    async def receipt(self, request: Request, caller: Caller) -> AsyncIterator[Receipt]:
        """Give the request its turn; ReplayedAnswer if it was answered already.

        InvalidRequest for a malformed key, Unprocessable (`idempotency_mismatch`) for the key of
        another request, ServiceUnavailable if equal ones take too long or are too many.
        """
        key = idempotency_key(request.headers.getlist(IDEMPOTENCY_KEY))
        if key is None:
            yield Receipt(self)
            return
        scope = f"{caller.identity} {request.method} {request.url.path}"
        sessions = request.headers.getlist(SESSION_HEADER)
        hashed = request_hash(request.url.query.encode(), sessions, await request.body())
        async with self.turns.turn(scope, key):
            row = await self.journal.answer(scope, key)
            if row is not None:
                raise ReplayedAnswer(self._replay(row, hashed))
            yield Receipt(self, scope, key, hashed)

    async def sweep(self) -> None:
        """Delete old answers, every ten minutes."""
        if time.monotonic() - self._swept >= idempotency.SWEEP_INTERVAL:
            self._swept = time.monotonic()
            await self.journal.commit(DropAnswers(self.now - ANSWER_TTL))

    def _replay(self, row: AnswerRow, hashed: bytes) -> Response:
        if row.request_hash != hashed:
            raise other_request()
        body = self.unpack(row.body)
        self.replayed += 1
        return Response(body, row.status, media_type=_JSON, headers={REPLAYED: "true"})

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


def _json(answer: BaseModel) -> bytes:
    return orjson.dumps(answer.model_dump(mode="json"))


def _fingerprint(key: str) -> str:
    """Return a short hash that tells apart keys of one lane signed with different secrets."""
    return hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
