"""One request to a route of the cloud's own, and its answer, which an `Idempotency-Key` repeats."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from any_agent.auth.access import Caller, Scope
from any_agent.config.base import NAME_PATTERN
from any_agent.errors import Forbidden, InvalidRequest, TooManyRequests
from any_agent.protocol import idempotency
from any_agent.protocol.idempotency import (
    ANSWER_TTL,
    AnswerClock,
    Turns,
    idempotency_key,
    other_request,
    request_hash,
)
from router.affinity import SESSION_HEADER
from router.body import json_object
from router.cloud.store import Answer, RunStore
from router.forward import IDEMPOTENCY_KEY

Body = TypeVar("Body", bound=BaseModel)

_CLOCK = "answers.clock"
_MAX_ANSWERS = 10_000
"""Answers that are stored for one caller."""


@dataclass(slots=True)
class Asked:
    """A request: who sent it, its body, and how its answer is stored."""

    caller: Caller
    content: bytes
    route: str
    """Method and path."""
    query: str = ""
    key: str | None = None
    """Its `Idempotency-Key`."""
    hash: bytes = b""
    clock: AnswerClock | None = None
    """The answers' clock, for a request with a key."""
    earlier: Answer | None = None
    """The answer that an equal request had."""
    kept: bool = False
    """Its answer is stored, or goes into the transaction of its effect."""

    def answer(self, status: int, data: Any, *, shown_key: str | None = None) -> Answer | None:
        """Return the answer as it is to be stored with the request's effect; None for a request
        without a key.

        ``shown_key``: the id of a key whose text the answer has beside ``data``.
        """
        if self.key is None or self.clock is None:
            return None
        self.kept = True
        caller = self.caller.identity
        body, now = orjson.dumps(data), self.clock.now
        return Answer(caller, self.route, self.key, self.hash, status, body, shown_key, now)

    def require_operator(self) -> None:
        if self.caller.scope is not Scope.ADMIN:
            raise Forbidden("this route needs the operator's key")

    @property
    def account(self) -> str:
        """The account whose key it has; Forbidden for the operator's."""
        if self.caller.tenant is None:
            raise Forbidden("a run is an account's: this route needs an account's key")
        return self.caller.tenant

    def parsed(self, kind: type[Body]) -> Body:
        """Return its body as a model; InvalidRequest for any other."""
        data = json_object(self.content)
        if data is None:
            raise InvalidRequest("the body must be a JSON object")
        try:
            return kind.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            message = first["msg"].replace(f"^{NAME_PATTERN}$", NAME_PATTERN)
            raise InvalidRequest(f"{name}: {message}", param=name or None) from None


class Answers:
    """The stored answers to changes by the cloud's own routes."""

    def __init__(self, store: RunStore, kept_clock: Any) -> None:
        self._store = store
        self._turns = Turns()
        self._clock = AnswerClock(kept_clock)
        self._swept = time.monotonic()

    @classmethod
    async def open(cls, store: RunStore) -> Answers:
        """Continue the clock of the stored answers."""
        answers = cls(store, await store.meta(_CLOCK))
        await store.put_meta(_CLOCK, answers._clock.state)
        return answers

    @asynccontextmanager
    async def asked(
        self, request: web.BaseRequest, caller: Caller, content: bytes
    ) -> AsyncIterator[Asked]:
        """Give a request its turn among equal ones, and the answer that one of them had.

        InvalidRequest for a malformed key, Unprocessable (`idempotency_mismatch`) for the key of
        another request, TooManyRequests for a caller with too many stored answers.
        """
        path, _, query = request.raw_path.partition("?")
        route = f"{request.method} {path}"
        key = None
        if request.method != "GET":
            key = idempotency_key(request.headers.getall(IDEMPOTENCY_KEY, ()))
        if key is None:
            yield Asked(caller, content, route, query)
            return
        await self._sweep()
        sessions = request.headers.getall(SESSION_HEADER, ())
        hashed = request_hash(query.encode(), sessions, content)
        async with self._turns.turn(f"{caller.identity} {route}", key):
            earlier = await self._store.answer(caller.identity, route, key)
            if earlier is not None and earlier.request_hash != hashed:
                raise other_request()
            if earlier is None and await self._store.answers_of(caller.identity) >= _MAX_ANSWERS:
                raise TooManyRequests(
                    f"{_MAX_ANSWERS} answers are stored for this key already, each for a day: send "
                    "the request without Idempotency-Key",
                    code="too_many_answers",
                )
            yield Asked(caller, content, route, query, key, hashed, self._clock, earlier)

    async def finish(self, asked: Asked, status: int, data: Any) -> None:
        """Store the answer of a route whose effect may happen twice, and so was not stored with
        it."""
        if not asked.kept and (answer := asked.answer(status, data)) is not None:
            await self._store.keep(answer)

    async def _sweep(self) -> None:
        if time.monotonic() - self._swept >= idempotency.SWEEP_INTERVAL:
            self._swept = time.monotonic()
            await self._store.drop_answers(self._clock.now - ANSWER_TTL)


Act = Callable[..., Awaitable[tuple[int, Any]]]
"""Answers a request, with the named parts of its path, by a status and JSON."""
