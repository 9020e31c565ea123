"""An httpx transport that answers in this process, under an unchanged SDK."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import httpx
import orjson

from any_agent.completions.apis import OPENAI_ERRORS, Api, all_apis
from any_agent.completions.call_types import Completion, Delta, Head
from any_agent.completions.json_body import json_of
from any_agent.completions.parsed_request import (
    ROLE_HEADER,
    ParsedRequest,
    ResponseEncoder,
    encode_whole,
    headers_of,
    role_in,
    token_logprobs,
    version_of,
    with_role,
)
from any_agent.completions.prepare import check_request, prepare
from any_agent.completions.responses.stored_response import (
    answer_of,
    deleted_record,
    stored_encoder,
)
from any_agent.direct.record import ChoiceTasks, DirectSession
from any_agent.errors import AnyAgentError, NotFound, UnsupportedParameter
from any_agent.types import Interaction, SessionMode

log = logging.getLogger(__name__)
T = TypeVar("T")
Patience: TypeAlias = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Awaits a piece of work for as long as its request allows."""

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
        patience = partial(_within_timeout, request)
        try:
            return await patience(self._answer(request, patience))
        except AnyAgentError as error:
            return _refusal(error)
        except httpx.TimeoutException:
            raise
        except Exception:
            log.exception("a request of the direct client failed")
            return _refusal(AnyAgentError("the call failed inside the client; see the log"))

    async def _answer(self, request: httpx.Request, patience: Patience) -> httpx.Response:
        session = self._session
        session.require_open()
        path = request.url.path.removeprefix(BASE_PATH)
        api = model_calls().get(path) if request.method == "POST" else None
        if api is None:
            query = request.url.query.decode("ascii", "replace")
            return _json(answer_request(session, request.method, path, query), {})
        role = role_in(request.headers.get_list(ROLE_HEADER))
        completer = await session.completer()
        content = await request.aread()
        body = await json_of(content)
        parse = partial(api.parse, body, session.context(completer))
        parsed = with_role(await check_request(completer, parse, len(content)), role)
        prepared = await prepare(completer, parsed.call, session.tree)
        session.require_open()
        running = ChoiceTasks(session, completer, prepared)
        try:
            if parsed.call.stream:
                return await _stream(parsed, running, patience)
            return await _whole(parsed, running)
        except BaseException:
            await running.close()
            raise


async def _whole(parsed: ParsedRequest, running: ChoiceTasks) -> httpx.Response:
    ended = await running.whole()
    await running.close()
    answers = [completion.interaction for completion in ended]
    encoder, headers = _encoder(parsed, running, answers)
    body = await encode_whole(encoder, parsed.call, answers)
    # All choices or none: a caller that was cancelled got none.
    for completion in ended:
        running.session.record(completion)
    return _json(body, headers)


async def _stream(
    parsed: ParsedRequest, running: ChoiceTasks, patience: Patience
) -> httpx.Response:
    # What fails before the first token is an error by its status.
    first = await running.next()
    encoder, headers = _encoder(parsed, running, [])
    headers |= {"content-type": "text/event-stream", "cache-control": "no-cache"}
    return httpx.Response(200, headers=headers, stream=_Events(running, encoder, first, patience))


def _encoder(
    parsed: ParsedRequest, running: ChoiceTasks, answers: list[Interaction]
) -> tuple[ResponseEncoder, dict[str, str]]:
    """Return the encoder of the answer, and its headers."""
    session, head = running.session, Head.of(running.prepared)
    version = version_of(answers, session.engine.version)
    train = session.mode is SessionMode.TRAIN
    headers = headers_of(parsed.call, head, version, session.id, train=train, answers=answers)
    return parsed.answer(head, version), headers


@dataclass(eq=False, repr=False)
class _Events(httpx.AsyncByteStream):
    """A call's events, each made when it is read; closing early cancels the rest of the sampling.

    A choice is recorded when the event that ends it is read.
    """

    running: ChoiceTasks
    encoder: ResponseEncoder
    first: Delta | Completion
    patience: Patience

    async def __aiter__(self) -> AsyncIterator[bytes]:
        running, encoder, item = self.running, self.encoder, self.first
        choices = len(running.prepared.choices)
        begun: set[int] = set()
        ended: dict[int, Interaction] = {}
        try:
            while True:
                index = item.index if isinstance(item, Delta) else item.choice.index
                event = b"" if index in begun else encoder.start(index)
                begun.add(index)
                if isinstance(item, Delta):
                    event += encoder.delta(item)
                else:
                    running.session.record(item)
                    ended[index] = item.interaction
                    event += encoder.end(index, item.interaction)
                    if len(ended) == choices:
                        event += encoder.last([ended[k] for k in sorted(ended)])
                if event:
                    yield event
                if len(ended) == choices:
                    return
                item = await self.patience(running.next())
        except AnyAgentError as error:
            # The status is sent already.
            yield encoder.failed(error)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        await self.running.close()


async def _within_timeout(request: httpx.Request, work: Awaitable[T]) -> T:
    """Return the result of the work; httpx.ReadTimeout if it takes longer than the request's read
    time-out."""
    seconds: float | None = request.extensions.get("timeout", {}).get("read")
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise httpx.ReadTimeout(
            f"the engine sent nothing for {seconds:g} s", request=request
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
