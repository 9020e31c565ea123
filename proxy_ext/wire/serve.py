"""Model calls over HTTP, whatever the shape of their answers: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from any_agent.chat import ChatFormat
from any_agent.completions import (
    TOKEN_LIMITS,
    ChatCall,
    Delta,
    Head,
    parse_chat,
    parse_completion,
    require_supported,
)
from any_agent.completions.answers import Answer
from any_agent.completions.answers.chat import ChatAnswer
from any_agent.completions.answers.logprobs import TokenLogprobs
from any_agent.completions.answers.text import TextAnswer
from any_agent.engine import Capabilities
from any_agent.errors import AnyAgentError, Unauthenticated, UnsupportedParameter
from any_agent.types import Interaction, SessionMode
from proxy_ext.calls.call import Item, Listener
from proxy_ext.calls.inflight import Place
from proxy_ext.calls.retries import mark_of, take_up
from proxy_ext.service import Service
from proxy_ext.sessions.session import Session
from proxy_ext.wire.http import Client, EventStream, read_json

_NOTHING = Capabilities(
    top_logprobs=False, penalties=False, min_p=False, logit_bias=False, grammar=False
)
_LONG_TEXT = 65_536
"""Characters; rendering a megabyte takes a second."""
_LONG_WHOLE = 4 * _LONG_TEXT
"""Of a whole conversation, which is rendered where its new messages alone cannot be."""
_MANY_ENTRIES = 10_000
"""Log-probabilities of a whole answer that is written in a thread: each takes a microsecond or two,
and 20 for each of 8,000 tokens stopped every stream for a quarter of a second."""
_BATCH = 65_536
"""Bytes of events that are sent at once, if so many are there."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request, whichever API it came by."""

    call: ChatCall
    answer: Callable[[Head, int], Answer]
    """The shape of its answer; given what is known before the first token, and the weight version
    of that."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A request that is to be checked."""

    service: Service
    session: Session | None
    """Loaded, if there is one: what it recorded stays in memory until the call has begun."""
    mode: SessionMode
    body: Any


Parse: TypeAlias = Callable[[Asking], Asked]


async def chat_completions(service: Service, request: Request) -> Response:
    """One model call of a session, or, where nothing is trained, of nobody's."""
    return await serve(service, request, _chat)


async def text_completions(service: Service, request: Request) -> Response:
    """A legacy completion, recorded like a chat call."""
    return await serve(service, request, _text)


def _chat(asking: Asking) -> Asked:
    service = asking.service
    call = parse_chat(asking.body, **parsing(asking))
    logprobs = token_logprobs(service.completer.chat)
    return Asked(call, lambda head, version: ChatAnswer(call, head, logprobs, f"v{version}"))


def _text(asking: Asking) -> Asked:
    chat = asking.service.completer.chat
    call = parse_completion(asking.body, **parsing(asking))
    logprobs = token_logprobs(chat)
    return Asked(call, lambda head, version: TextAnswer(call, head, logprobs, f"v{version}", chat))


def parsing(asking: Asking) -> dict[str, Any]:
    """What every API's parser is told beside the body."""
    service = asking.service
    return {"mode": asking.mode, "sampling": service.sampling, "model": service.config.model.name}


@lru_cache(maxsize=4)
def token_logprobs(chat: ChatFormat) -> TokenLogprobs:
    """Of a chat format: what is written of its tokens is written once."""
    return TokenLogprobs(chat)


async def serve(service: Service, request: Request, parse: Parse) -> Response:
    """A model call of any API: admitted, checked, begun or taken up again, answered.

    Raises AnyAgentError; what fails after the first event ends the stream in its API's shape.
    """
    # First of all: what is refused for want of a place must cost next to nothing.
    place = service.calls.enter()
    try:
        session, tenant = await _whose(service, request)
        service.quotas.require_tokens(tenant)
        mode = session.mode if session is not None else SessionMode.EVAL
        body = await read_json(request)
        # What a retry or the prompt finds in the tree stays there until the call has begun.
        with service.sessions.trees.pinned(session) if session is not None else nullcontext():
            if session is not None:
                await service.sessions.load(session)
            asked = parse(Asking(service, session, mode, body))
            await _require_supported(service, asked.call)
            listener = await _begin(
                service, request, asked.call, session, place=place, tenant=tenant
            )
    except BaseException:
        place.leave()
        raise
    listener.place = place
    if asked.call.stream:
        return await _stream(service, request, asked, listener)
    return await _whole(service, request, asked, listener)


async def _require_supported(service: Service, call: ChatCall) -> None:
    """UnsupportedParameter for what the engine cannot do, which is asked only if that matters."""
    vocabulary = service.completer.chat.vocab_size
    try:
        require_supported(call, _NOTHING, vocab_size=vocabulary)
    except UnsupportedParameter:
        can = await service.engine.capabilities()
        require_supported(call, can, vocab_size=vocabulary)


async def _whose(service: Service, request: Request) -> tuple[Session | None, str | None]:
    """The session that a call belongs to, and the tenant that it is charged to."""
    session = await service.auth.session_or_none(request, request.query_params.get("session_id"))
    if session is not None:
        session.require_open()
        return session, session.row.tenant
    if service.run.state == "training":
        raise Unauthenticated(
            "calls belong to a session while training goes on: POST /rl/v1/start_session "
            "(mode train or eval) and use its api_key",
            code="no_session",
        )
    return None, service.auth.caller(request).tenant


async def _begin(
    service: Service,
    request: Request,
    call: ChatCall,
    session: Session | None,
    *,
    place: Place,
    tenant: str | None,
) -> Listener:
    """The call that the request repeats, or a new one."""
    completer = service.completer
    tree, mark = None, None
    if session is not None:
        tree, mark = session.tree, mark_of(request, await request.body())
        if mark is not None and mark.retry_count > 0:
            earlier = await take_up(service.calls, session, mark, call)
            if earlier is not None:
                return earlier
    await service.calls.turns.next()
    past = completer.find(call, tree)
    whole = past.found.characters if past.found is not None else 0
    if past.new_characters > _LONG_TEXT or whole > _LONG_WHOLE:
        prepared = await asyncio.to_thread(completer.prepare, call, tree, past)
    else:
        prepared = completer.prepare(call, tree, past)
    return service.calls.start(
        prepared, session, stream=call.stream, place=place, tenant=tenant, mark=mark
    )


async def _whole(service: Service, request: Request, asked: Asked, listener: Listener) -> Response:
    try:
        answers: dict[int, Interaction] = {}
        async with Client(request, on_leave=listener.leave) as client:
            while len(answers) < listener.call.head.choices:
                item = await listener.next()
                if not isinstance(item, Delta):
                    answers[item.index] = item.interaction
            in_order = [answers[k] for k in sorted(answers)]
            version = _version(service, in_order)
            answer = asked.answer(listener.call.head, version)
            if _entries(asked.call, in_order) > _MANY_ENTRIES:
                body = await asyncio.to_thread(answer.whole, in_order)
            else:
                body = answer.whole(in_order)
            await client.look()
        response = Response(
            body, headers=_headers(listener, asked.call, version), media_type="application/json"
        )
        if not client.gone:
            for index in answers:
                listener.deliver(index)
        return response
    finally:
        await service.calls.release(listener)


async def _stream(service: Service, request: Request, asked: Asked, listener: Listener) -> Response:
    # What fails before the first token is an HTTP error, so the first item comes first.
    try:
        async with Client(request, on_leave=listener.leave):
            first = await listener.next()
        version = _version(service, list(listener.call.recorded.values()))
        answer = asked.answer(listener.call.head, version)
        headers = _headers(listener, asked.call, version)
    except BaseException:
        await service.calls.release(listener)
        raise

    async def finish() -> None:
        await service.calls.release(listener)

    events = _events(request, listener, answer, first)
    return EventStream(
        events, headers, finish=finish, send_timeout=service.config.server.client_timeout
    )


async def _events(
    request: Request, listener: Listener, answer: Answer, item: Item
) -> AsyncGenerator[bytes]:
    """One call's events. A choice is delivered once the event with its finish reason was sent."""
    begun: set[int] = set()
    ended: dict[int, Interaction] = {}
    choices = listener.call.head.choices
    async with Client(request, on_leave=listener.leave) as client:
        await client.look()
        while True:
            events: list[bytes] = []
            size = 0
            # What is there already leaves at once, in one piece.
            while isinstance(item, Delta):
                if item.index not in begun:
                    begun.add(item.index)
                    events.append(answer.start(item.index))
                event = answer.delta(item)
                events.append(event)
                size += len(event)
                if not listener.ready or size > _BATCH:
                    break
                item = await listener.next()
            if data := b"".join(events):
                yield data
            if not isinstance(item, Delta):
                index = item.index
                ended[index] = item.interaction
                event = answer.end(index, item.interaction)
                if index not in begun:
                    event = answer.start(index) + event
                if len(ended) == choices:
                    event += answer.last([ended[k] for k in sorted(ended)])
                yield event
                if not client.gone:
                    listener.deliver(index)
                if len(ended) == choices:
                    return
            try:
                item = await listener.next()
            except AnyAgentError as error:
                # The status is sent already.
                yield answer.failed(error)
                return


def _entries(call: ChatCall, answers: list[Interaction]) -> int:
    """How many log-probabilities an answer tells of."""
    return (1 + call.top_logprobs) * sum(len(a.output_ids) for a in answers) * call.logprobs


def _version(service: Service, answers: list[Interaction]) -> int:
    """Of the last token, or, before there is one, of the next."""
    sampled = [int(a.output_versions[-1]) for a in answers if len(a.output_versions)]
    return max(sampled, default=service.run.version)


def _headers(listener: Listener, call: ChatCall, version: int) -> dict[str, str]:
    head, session = listener.call.head, listener.call.session
    out = {"x-any-agent-version": str(version)}
    if head.choices == 1:
        # Several ones' would be longer than many a proxy lets a header be.
        out["x-any-agent-interaction"] = head.id
    if session is not None:
        out["x-any-agent-session"] = session.id
    if call.overrides:
        used = {
            name: getattr(head.gconfig, "max_new_tokens" if name in TOKEN_LIMITS else name)
            for name in sorted(call.overrides)
        }
        out["x-any-agent-overrides"] = json.dumps(used)
    return out
