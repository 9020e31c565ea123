"""An httpx transport that answers in this process, under an unchanged SDK."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from typing import Any, TypeVar

import httpx
import orjson

from any_agent.completions.apis import OPENAI_ERRORS, Api, all_apis
from any_agent.completions.call_types import Completion, Delta, Head
from any_agent.completions.encoders import ResponseEncoder
from any_agent.completions.json_body import json_of
from any_agent.completions.parsed_request import (
    ParsedRequest,
    encode_whole,
    headers_of,
    token_logprobs,
    version_of,
)
from any_agent.completions.prepare import check_request, prepare
from any_agent.completions.responses.stored_response import (
    answer_of,
    deleted_record,
    stored_encoder,
)
from any_agent.direct.record import ChoiceTasks, DirectSession
from any_agent.errors import AnyAgentError, NotFound, UnsupportedParameter
from any_agent.types import Interaction

log = logging.getLogger(__name__)
T = TypeVar("T")

BASE_PATH = "/v1"
BASE_URL = f"http://engine.invalid{BASE_PATH}"
"""The base URL of requests that never leave the process."""


class InProcessClient(httpx.AsyncClient):
    """Sends every request to one session; once closed, it refuses requests with an error."""

    def __init__(self, session: DirectSession) -> None:
        # A proxy named in the environment must not get these requests.
        super().__init__(transport=InProcessTransport(session), trust_env=False)
        self.session = session

    async def aclose(self) -> None:
        await self.session.close()

    @property
    def is_closed(self) -> bool:
        return self.session.closed


class InProcessTransport(httpx.AsyncBaseTransport):
    """Answers like a service with one session.

    The read time-out holds: the longest wait for a whole answer, or between a stream's events.
    """

    def __init__(self, session: DirectSession) -> None:
        self._session = session

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        patience = _Patience(request)
        try:
            return await patience(self._answer(request, patience))
        except AnyAgentError as error:
            return _refusal(error)
        except httpx.TimeoutException:
            raise
        except Exception:
            log.exception("a request of the direct client failed")
            return _refusal(AnyAgentError("the call failed inside the client; see the log"))

    async def _answer(self, request: httpx.Request, patience: _Patience) -> httpx.Response:
        self._session.require_open()
        path = request.url.path.removeprefix(BASE_PATH)
        api = model_calls().get(path) if request.method == "POST" else None
        if api is None:
            query = request.url.query.decode("ascii", "replace")
            return _json(answer_request(self._session, request.method, path, query), {})
        session = self._session
        completer = await session.completer()
        content = await request.aread()
        body = await json_of(content)
        parse = partial(api.parse, body, session.context(completer))
        parsed = await check_request(completer, parse, len(content))
        prepared = await prepare(completer, parsed.call, session.tree)
        session.require_open()
        stream = parsed.call.stream
        running = ChoiceTasks(completer, prepared, session_id=session.id, stream=stream)
        session.calls.add(running)
        return await _Call(session, parsed, running).response(stream, patience)


class _Call:
    """A call that has begun, and the encoder of its answer."""

    def __init__(self, session: DirectSession, parsed: ParsedRequest, running: ChoiceTasks) -> None:
        self.session = session
        self._parsed = parsed
        self.running = running
        self._head = Head.of(running.prepared)

    async def response(self, stream: bool, patience: _Patience) -> httpx.Response:
        try:
            return await (self._stream(patience) if stream else self._whole())
        except BaseException:
            await self.end()
            raise

    async def end(self) -> None:
        await self.running.close()
        self.session.calls.discard(self.running)

    async def _whole(self) -> httpx.Response:
        ended = await self.running.whole()
        await self.end()
        answers = [completion.interaction for completion in ended]
        answer, headers = self._encoder(answers)
        body = await encode_whole(answer, self._parsed.call, answers)
        # All choices or none: a caller that was cancelled got none.
        for completion in ended:
            self.session.record(completion)
        return _json(body, headers)

    async def _stream(self, patience: _Patience) -> httpx.Response:
        # What fails before the first token is an error by its status.
        first = await self.running.next()
        answer, headers = self._encoder([])
        events = _Events(self, answer, first, patience)
        headers |= {"content-type": "text/event-stream", "cache-control": "no-cache"}
        return httpx.Response(200, headers=headers, stream=events)

    def _encoder(self, answers: list[Interaction]) -> tuple[ResponseEncoder, dict[str, str]]:
        version = version_of(answers, self.session.engine.version)
        headers = headers_of(self._parsed.call, self._head, version, self.session.id)
        return self._parsed.answer(self._head, version), headers


class _Events(httpx.AsyncByteStream):
    """A call's events, each made when it is read; closing early cancels the rest of the sampling.

    A choice is recorded when the event that ends it is read.
    """

    def __init__(
        self, call: _Call, answer: ResponseEncoder, first: Delta | Completion, patience: _Patience
    ) -> None:
        self._call = call
        self._answer = answer
        self._first: Delta | Completion | None = first
        self._patience = patience
        self._begun: set[int] = set()
        self._ended: dict[int, Interaction] = {}

    async def __aiter__(self) -> AsyncIterator[bytes]:
        choices = len(self._call.running.prepared.choices)
        try:
            while len(self._ended) < choices:
                try:
                    event = self._event(await self._next())
                except AnyAgentError as error:
                    # The status is sent already.
                    event = self._answer.failed(error)
                    choices = 0
                if event:
                    yield event
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        await self._call.end()

    async def _next(self) -> Delta | Completion:
        item, self._first = self._first, None
        return item if item is not None else await self._patience(self._call.running.next())

    def _event(self, item: Delta | Completion) -> bytes:
        answer = self._answer
        index = item.index if isinstance(item, Delta) else item.choice.index
        start = b"" if index in self._begun else answer.start(index)
        self._begun.add(index)
        if isinstance(item, Delta):
            return start + answer.delta(item)
        self._call.session.record(item)
        self._ended[index] = item.interaction
        end = start + answer.end(index, item.interaction)
        if len(self._ended) < len(self._call.running.prepared.choices):
            return end
        return end + answer.last([self._ended[k] for k in sorted(self._ended)])


class _Patience:
    """The read time-out of one request."""

    def __init__(self, request: httpx.Request) -> None:
        self._request = request
        self._seconds: float | None = request.extensions.get("timeout", {}).get("read")

    async def __call__(self, work: Awaitable[T]) -> T:
        """Return the result of the work; httpx.ReadTimeout if it takes longer."""
        try:
            async with asyncio.timeout(self._seconds) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise httpx.ReadTimeout(
                f"the engine sent nothing for {self._seconds:g} s", request=self._request
            ) from None


def _refusal(error: AnyAgentError) -> httpx.Response:
    headers = {**error.headers(), "content-type": "application/json"}
    return httpx.Response(error.status, headers=headers, content=orjson.dumps(error.body()))


def _json(body: bytes, headers: dict[str, str]) -> httpx.Response:
    return httpx.Response(200, headers=headers | {"content-type": "application/json"}, content=body)


def model_calls() -> dict[str, Api]:
    """Return the APIs that OpenAI's client can call, by path: it reads errors in its own form."""
    return {a.path: a for a in all_apis() if a.by_policy and a.errors is OPENAI_ERRORS}


def answer_request(session: DirectSession, method: str, path: str, query: str) -> bytes:
    """Return the answer to a request that is no model call; NotFound without a route."""
    _, kind, *rest = f"{path}/".split("/")
    if method == "GET" and kind == "models" and len(rest) <= 2:
        return orjson.dumps(_models(session.model, rest[0]))
    if method == "DELETE" and kind == "responses" and len(rest) == 2:
        interaction = answer_of(rest[0], session.tree)
        interaction.request = deleted_record(interaction)
        return orjson.dumps({"id": interaction.id, "object": "response", "deleted": True})
    if method == "GET" and kind == "responses" and len(rest) == 2:
        if "stream=true" in query:
            raise UnsupportedParameter(
                "a stored answer is not streamed: leave stream out", param="stream"
            )
        interaction = answer_of(rest[0], session.tree)
        logprobs = token_logprobs(session.chat)
        encoder, _ = stored_encoder(interaction, session.tree, logprobs, session.chat)
        return encoder.whole([interaction])
    raise NotFound(
        f"there is no route {method} {path[:80]}: an engine in this process has "
        f"{', '.join(sorted(model_calls()))} and /models"
    )


def _models(own: str, name: str) -> dict[str, Any]:
    model = {"id": own, "object": "model", "created": 0, "owned_by": "any-agent"}
    if not name:
        return {"object": "list", "data": [model]}
    if name != own:
        raise NotFound(
            f"there is no model {name[:80]!a}; the policy is called {own!a}",
            code="model_not_found",
            param="model",
        )
    return model
