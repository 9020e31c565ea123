"""`Idempotency-Key`: the same request again has the first answer again, and one effect.

A key belongs to its caller, method and path. Its request is known by a hash of the body's JSON (so
neither the order of its fields nor white space matters), the query and the session's header; the
key with another one is refused. Only answers that say yes are kept, each in the transaction of its
effect, so that a crash leaves both or neither. Equal requests at the same time take turns: the
first that succeeds answers them all.

An answer is as long as its session's rewards are many, and is stored compressed. Leases and exports
are not kept: they are long, and asked for again they answer the same to their holder.
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
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from any_agent.auth.access import Caller
from any_agent.errors import Conflict, InvalidRequest, ServiceUnavailable, Unprocessable
from any_agent.keys import KeySigner, Lane
from proxy_ext.auth import SESSION_HEADER
from proxy_ext.journal import AnswerRow, DropAnswers, Journal, PutAnswer, Statement
from proxy_ext.journal.statements import KeepAnswer, no_receipt

HEADER = "idempotency-key"
KEPT_SECONDS = 24 * 3600.0
_SWEEP_INTERVAL = 600.0
_MAX_WAITING = 1024
"""Requests that wait for an equal one, in all."""
_MAX_WAIT = 330.0
"""Seconds: more than any route takes that is not a poll."""
_PARSED_BYTES = 1 << 20
"""Longer bodies are the same if their bytes are: sorting them would hold everything up."""
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_JSON = "application/json"


# No error: but a FastAPI dependency answers in no other way.
class ReplayedAnswer(Exception):
    """The request was answered before; ``response`` is that answer."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


def idempotency_key(request: Request) -> str | None:
    """The request's key; InvalidRequest for one that is none."""
    found = set(request.headers.getlist(HEADER))
    if not found:
        return None
    key = found.pop()
    if found or not _KEY.fullmatch(key):
        raise InvalidRequest(
            "Idempotency-Key must be one text of 1 to 255 visible ASCII characters",
            code="bad_idempotency_key",
        )
    return key


def request_hash(request: Request, body: bytes) -> bytes:
    """The same for requests that ask for the same."""
    # What is no JSON, or too deep, its route refuses, or takes to be empty.
    with suppress(orjson.JSONDecodeError, orjson.JSONEncodeError):
        if len(body) <= _PARSED_BYTES:
            body = orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)
    digest = hashlib.blake2b(digest_size=16)
    named = ",".join(request.headers.getlist(SESSION_HEADER))
    for part in (request.url.query.encode(), named.encode("latin-1"), body):
        digest.update(len(part).to_bytes(8))
        digest.update(part)
    return digest.digest()


class Receipt:
    """What a route needs to answer a request once, whether it came with a key or not.

    A route passes ``keep`` to what makes the change, which commits the statements together with
    it, and returns ``response(answer)``.
    """

    def __init__(
        self,
        answers: IdempotencyStore,
        scope: str = "",
        key: str | None = None,
        request: bytes = b"",
    ) -> None:
        self._answers = answers
        self._scope = scope
        self._key = key
        self._request = request
        self._body: bytes | None = None

    @property
    def keep(self) -> KeepAnswer:
        """`no_receipt` itself for a request without a key."""
        return self._keep if self._key is not None else no_receipt

    def _keep(self, answer: BaseModel) -> tuple[Statement, ...]:
        assert self._key is not None
        self._body = _json(answer)
        body = self._answers.pack(answer)
        return (PutAnswer(self._scope, self._key, self._request, 200, body, time.time()),)

    async def store(self, answer: BaseModel) -> Response:
        """Keep the answer of a route that writes nothing itself, and answer it.

        After a crash just before it the request's repetition does the same once more: only for
        what may be done twice.
        """
        if statements := self.keep(answer):
            await self._answers.journal.commit(*statements)
        return self.response(answer)

    def response(self, answer: BaseModel) -> Response:
        """The answer; as it was kept, if it was."""
        return Response(self._body or _json(answer), media_type=_JSON)


@dataclass(slots=True, eq=False)
class _KeyLock:
    """Equal requests, one at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class IdempotencyStore:
    """The kept answers of one rank. No session key is stored with them: they are derived again."""

    def __init__(self, journal: Journal, signer: KeySigner) -> None:
        self.journal = journal
        self._signer = signer
        self._turns: dict[tuple[str, str], _KeyLock] = {}
        self._waiting = 0
        self._swept = time.monotonic()
        self.replayed = 0
        """Requests that were answered as their first ones had been."""

    @asynccontextmanager
    async def receipt(self, request: Request, caller: Caller) -> AsyncIterator[Receipt]:
        """The request's turn; Replayed if it was answered already.

        InvalidRequest for a bad key, Unprocessable (`idempotency_mismatch`) for the key of another
        request, ServiceUnavailable if equal ones take too long or are too many.
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
        """Forget old answers, now and then."""
        if time.monotonic() - self._swept >= _SWEEP_INTERVAL:
            self._swept = time.monotonic()
            await self.journal.commit(DropAnswers(time.time() - KEPT_SECONDS))

    def _replay(self, row: AnswerRow, hashed: bytes) -> Response:
        if row.request_hash != hashed:
            raise Unprocessable(
                "this Idempotency-Key came with another request before; every request needs one "
                "of its own",
                code="idempotency_mismatch",
            )
        body = self.unpack(row.body)
        self.replayed += 1
        return Response(body, row.status, media_type=_JSON, headers={"idempotent-replayed": "true"})

    @asynccontextmanager
    async def _turn(self, scope: str, key: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault((scope, key), _KeyLock())
        turn.users += 1
        try:
            await self._wait_for(turn)
            try:
                yield
            finally:
                turn.lock.release()
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[scope, key]

    async def _wait_for(self, turn: _KeyLock) -> None:
        if not turn.lock.locked():
            await turn.lock.acquire()
            return
        busy = ServiceUnavailable(
            "an equal request with this Idempotency-Key is under way; ask again for its answer",
            code="idempotency_busy",
            retry_after=2,
        )
        if self._waiting >= _MAX_WAITING:
            raise busy
        self._waiting += 1
        try:
            async with asyncio.timeout(_MAX_WAIT):
                await turn.lock.acquire()
        except TimeoutError:
            raise busy from None
        finally:
            self._waiting -= 1

    # -- what is stored: a byte that says how, and the JSON, short ---------------------------------

    def pack(self, answer: BaseModel) -> bytes:
        """The answer without the session key that it may hold."""
        data = answer.model_dump(mode="json")
        lane = self._signer.verify(data.get("api_key") or "")
        if lane is None:
            return b"0" + zlib.compress(orjson.dumps(data), 1)
        seal = {"rank": lane.rank, "lane": lane.id, "print": _print(data["api_key"])}
        return b"1" + zlib.compress(orjson.dumps(data | {"api_key": seal}), 1)

    def unpack(self, body: bytes) -> bytes:
        """The answer's JSON, byte for byte; Conflict if its key's secret is gone."""
        kind, content = body[:1], zlib.decompress(body[1:])
        if kind == b"0":
            return content
        data = orjson.loads(content)
        return orjson.dumps(data | {"api_key": self._key(data["api_key"])})

    def _key(self, seal: dict[str, Any]) -> str:
        for key in self._signer.keys_of(Lane(seal["rank"], seal["lane"])):
            if _print(key) == seal["print"]:
                return key
        raise Conflict(
            "the session's key was signed with a secret that is not used any more; open another "
            "session, with a new Idempotency-Key",
            code="key_retired",
        )


def _json(answer: BaseModel) -> bytes:
    return orjson.dumps(answer.model_dump(mode="json"))


def _print(key: str) -> str:
    """Tells the keys of one lane apart that different secrets signed."""
    return hashlib.blake2b(key.encode(), digest_size=4).hexdigest()
