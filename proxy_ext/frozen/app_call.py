"""A frozen model's call through LiteLLM's own app: its answer reaches the client as LiteLLM gives
it, and is read on the way for the record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Self

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from any_agent.auth.access import Caller
from any_agent.auth.access import Scope as KeyScope
from any_agent.errors import ProviderError
from any_agent.keys import KEY_PREFIXES
from proxy_ext import litellm_proxy
from proxy_ext.frozen.call import FrozenCall
from proxy_ext.frozen.provider_requests import (
    INPUTS,
    FrozenRequest,
    check_tools,
    refuse_operators,
    require_one_model,
    require_passed,
)
from proxy_ext.litellm_shim import count_tokens
from proxy_ext.litellm_streams import EventReader
from proxy_ext.sessions.session import RecordedSession

log = logging.getLogger(__name__)

_AHEAD = 64
"""Parts of an answer that wait for us; beyond that LiteLLM waits, too."""
_CHATS = ("chat", "completions")
"""The APIs whose streams have no usage unless a client requests it."""
CONFIGURATION = "LiteLLM's configuration"
COST = b"x-litellm-response-cost"
"""The header with the USD of an answer; of one that its cache gives LiteLLM says the first's."""
CACHE_KEY = b"x-litellm-cache-key"
"""The header of an answer that LiteLLM's cache gives."""
_CREDENTIALS = (
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"x-litellm-api-key",
    b"x-goog-api-key",
    b"ocp-apim-subscription-key",
    b"cookie",
)
_KEYS = tuple(prefix.encode() for prefix in KEY_PREFIXES)
_STEERING = (b"x-litellm-", b"litellm-", b"cache-control")
"""Beginnings of the headers by which LiteLLM's callers choose retries, tags, callbacks and more."""
_HOP = (b"content-length", b"transfer-encoding", b"connection", b"server", b"date")
_OF_PROVIDER = (b"x-litellm-model-api-base", b"llm_provider-")
"""Beginnings of the headers of an answer that say where it comes from; an agent need not know."""


class Answered(ProviderError):
    """LiteLLM's own error answer, which goes to the client as it is."""

    response: Response

    @classmethod
    def of(cls, response: Response) -> Self:
        error = cls(f"LiteLLM answered {response.status_code}")
        error.response = response
        return error


def app_request(api: str, body: Mapping[str, Any], *, admin: bool) -> FrozenRequest:
    """Return a request that LiteLLM checks further.

    UnsupportedParameter for what the operator sets; of callers other than an admin, for all that
    is not a parameter of the API: LiteLLM takes hundreds for its own.
    """
    require_one_model(body["model"])
    params = dict(body)
    if admin:
        refuse_operators(body, CONFIGURATION)
    else:
        require_passed(api, body, CONFIGURATION)
        check_tools(api, body)
        # Recorded, as `body` is.
        params.pop("metadata", None)
    given = body.get(INPUTS[api])
    plain = given if isinstance(given, list) else [{"role": "user", "content": given}]
    messages = [m if isinstance(m, dict) else {"role": "user", "content": m} for m in plain]
    tools, options = body.get("tools"), body.get("stream_options")
    apart = {INPUTS[api], "tools", "stream", "model"}
    return FrozenRequest(
        api=api,
        model=body["model"],
        params=params,
        messages=messages,
        tools=tools if isinstance(tools, list) else None,
        recorded={k: v for k, v in body.items() if k not in apart and v is not None},
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        previous=None,
    )


@dataclass(slots=True)
class AppDeployment:
    """The place that LiteLLM has chosen for a call."""

    scope: Scope
    """The client's request, as LiteLLM's app gets it."""
    app: ASGIApp
    deployment_id: str | None = None
    cost_of_answer: float | None = None
    """The cost that LiteLLM says."""
    cached: bool = False

    def cost(self, api: str, usage: Mapping[str, Any]) -> float | None:
        """Return the USD of the call; None if it is not known."""
        if self.cached:
            return 0.0
        if self.cost_of_answer is not None:
            return self.cost_of_answer
        return litellm_proxy.price(self.deployment_id, api, usage)

    def count(self, text: str) -> int:
        return count_tokens("openai/gpt-4o", text)


class AppCall(FrozenCall):
    """One call through LiteLLM's app and its delivery to one client."""

    deployment: AppDeployment

    async def _call_provider(self) -> bytes:
        with litellm_proxy.facts_of(self.response.id) as facts:
            try:
                return await self._pass_answer()
            finally:
                self._take(facts)

    def _take(self, facts: litellm_proxy.AnswerFacts) -> None:
        response = self.response
        response.provider_model = facts.model or response.provider_model
        if facts.streamed and (facts.usage is None or self.request.api in _CHATS):
            # Of a stream without a usage LiteLLM has told the client its own estimate, or nothing.
            response.usage = facts.usage or {}

    async def _pass_answer(self) -> bytes:
        place, request = self.deployment, self.request
        params = request.params
        if request.api == "completions" and request.stream and not request.include_usage:
            # Of chats LiteLLM itself requests it.
            options = params.get("stream_options")
            if isinstance(options, dict | None) and litellm_proxy.can_report_usage(request.model):
                options = {**(options or {}), "include_usage": True}
                params = {**params, "stream_options": options}
        body = orjson.dumps(params)
        answer = ask(place.app, place.scope, body, self.response.id)
        async with aclosing(answer):
            start = await anext(answer)
            headers = [(k, v) for k, v in shown_headers(start, place.scope) if k not in _HOP]
            said = {k.decode("latin-1"): v.decode("latin-1") for k, v in headers}
            place.deployment_id = said.get("x-litellm-model-id")
            with suppress(ValueError):
                place.cost_of_answer = float(said.get(COST.decode(), ""))
            place.cached = CACHE_KEY.decode() in said
            self.answer_headers = said
            if start["status"] < 400 and said.get("content-type", "").startswith("text/event-st"):
                return await self._pass_events(answer)
            body = b"".join([part["body"] async for part in answer])
        if start["status"] >= 400:
            raise Answered.of(Response(body, start["status"], said))
        try:
            self.response.whole(orjson.loads(body))
        except (orjson.JSONDecodeError, AttributeError):
            raise ProviderError(f"the answer of model {self.request.model} is no JSON") from None
        return body

    async def _pass_events(self, answer: AsyncGenerator[Message]) -> bytes:
        """Queue the answer's bytes; return its end, from the event that ends it on."""
        # A stream's cost is not known when its headers leave.
        self.deployment.cost_of_answer = None
        reader, end = EventReader(), bytearray()
        ended = False
        async for part in answer:
            for raw, event in reader.feed(part["body"]):
                if event is not None:
                    self._require_no_error(event)
                    data, ends = self.response.event(event)
                    ended = ends or ended
                    if not data:
                        # Usage that the client did not request.
                        continue
                if ended:
                    # Not sent before the call is recorded.
                    end += raw
                else:
                    await self._room.acquire()
                    self._items.put_nowait(raw)
        if not ended:
            raise ProviderError(f"the answer of model {self.request.model} broke off")
        return bytes(end + reader.rest)

    def _require_no_error(self, event: Mapping[str, Any]) -> None:
        error = event.get("error")
        if event.get("type") == "error" or (error and "choices" not in event):
            text = error.get("message") if isinstance(error, Mapping) else event.get("message")
            raise ProviderError(f"model {self.request.model} broke off: {str(text)[:500]}")


def litellm_scope(
    scope: Scope, path: str, caller: Caller, session: RecordedSession | None, tenant: str | None
) -> Scope:
    """Return a request's scope as LiteLLM's app gets it: with its caller, and no key of ours.

    ``caller``: the holder of the key, who has been checked.
    """
    row = session.row if session is not None else None
    about = {}
    if row is not None:
        about = {"session_id": row.id, "task_id": row.task_id, "group_id": row.group_id}
    admin = caller.scope is KeyScope.ADMIN and row is None
    known = litellm_proxy.LiteLLMCaller(admin, caller.identity or caller.name, tenant, about)
    dropped = (*_CREDENTIALS, b"accept-encoding")
    headers = [
        (k, v)
        for k, v in scope["headers"]
        if k not in dropped and not _holds_key(v) and (admin or not k.startswith(_STEERING))
    ]
    query = scope["query_string"]
    if _holds_key(query) or (not admin and scope["method"] != "GET"):
        query = b""
    headers.append((b"authorization", litellm_proxy.BEARER))
    plain = {k: v for k, v in scope.items() if k not in ("app", "router", "route", "endpoint")}
    own = {"path": path, "raw_path": path.encode(), "query_string": query, "headers": headers}
    return {**plain, **own, "state": {}, litellm_proxy.CALLER_SCOPE_KEY: known}


def shown_headers(start: Message, scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers for its client: an agent sees no provider's."""
    if scope[litellm_proxy.CALLER_SCOPE_KEY].admin:
        return list(start["headers"])
    return [(k, v) for k, v in start["headers"] if not k.startswith(_OF_PROVIDER)]


def _holds_key(value: bytes) -> bool:
    return any(prefix in value for prefix in _KEYS)


async def ask(app: ASGIApp, scope: Scope, body: bytes, call_id: str) -> AsyncGenerator[Message]:
    """Yield the messages of an app's answer to one request; closing the generator ends it there."""
    queue: asyncio.Queue[Message | None] = asyncio.Queue(_AHEAD)
    bodies = [body]
    replaced = (b"content-length", litellm_proxy.CALL_ID)
    headers = [(k, v) for k, v in scope["headers"] if k not in replaced]
    headers += zip(replaced, (str(len(body)).encode(), call_id.encode()), strict=True)

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        # The client leaves by our cancelling the task.
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        try:
            await app({**scope, "headers": headers}, receive, queue.put)
        except Exception:
            log.exception("LiteLLM's app failed in a request")
        await queue.put(None)

    task = asyncio.create_task(run())
    try:
        while (message := await queue.get()) is not None:
            if message["type"] == "http.response.start" or message.get("body"):
                yield message
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                return
        raise ProviderError("LiteLLM broke off its answer; try again")
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
