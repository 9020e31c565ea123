"""Model calls over HTTP, whatever the shape of their answers: whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from any_agent.completions import ChatCall, Delta, Prepared
from any_agent.completions.encoders import ResponseEncoder
from any_agent.completions.parsed_request import (
    ParsedRequest,
    ParseRules,
    headers_of,
    parse_chat_request,
    parse_text_request,
    version_of,
    whole,
)
from any_agent.completions.prepare import checked, prepare
from any_agent.errors import AnyAgentError, Unauthenticated
from any_agent.types import Interaction, SessionMode
from proxy_ext.calls.call import Item, Listener
from proxy_ext.calls.concurrency_limit import CallSlot
from proxy_ext.calls.retries import join_retried_call, retry_mark
from proxy_ext.service import RankService
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.web.exchange import ClientConnection, EventStream, read_json

_BATCH = 65_536
"""Bytes of events that are sent at once, if so many are there."""


@dataclass(frozen=True, slots=True)
class ModelCallContext:
    """A request that is to be checked."""

    service: RankService
    session: RecordedSession | None
    """Loaded, if there is one: what it recorded stays in memory until the call has begun."""
    mode: SessionMode
    body: Any

    @property
    def rules(self) -> ParseRules:
        sampling = self.service.sampling
        if self.session is None:
            # Whoever only wants an answer gets what OpenAI's API gives.
            sampling = sampling.new(temperature=1.0)
        elif self.mode is SessionMode.EVAL:
            sampling = self.service.eval_sampling
        config = self.service.config
        return ParseRules(self.mode, sampling, config.model.name, config.server.unknown_parameters)


Parse: TypeAlias = Callable[[ModelCallContext], ParsedRequest]


async def chat_completions(service: RankService, request: Request) -> Response:
    """One model call of a session, or, where nothing is trained, of nobody's."""
    return await serve(service, request, _chat)


async def text_completions(service: RankService, request: Request) -> Response:
    """A legacy completion, recorded like a chat call."""
    return await serve(service, request, _text)


def _chat(asking: ModelCallContext) -> ParsedRequest:
    return parse_chat_request(asking.body, asking.rules, asking.service.completer.chat)


def _text(asking: ModelCallContext) -> ParsedRequest:
    return parse_text_request(asking.body, asking.rules, asking.service.completer.chat)


async def serve(service: RankService, request: Request, parse: Parse) -> Response:
    """A model call of any API: admitted, checked, begun or taken up again, answered.

    Raises AnyAgentError; what fails after the first event ends the stream in its API's shape.
    """
    # First of all: what is refused for want of a slot must cost next to nothing.
    slot = service.calls.acquire_slot()
    try:
        session, tenant = await _session_and_tenant(service, request)
        service.quotas.require_tokens(tenant)
        body = await read_json(request)
        if service.frozen.knows(body):
            # It takes nothing of the engine's.
            slot.release()
            return await service.frozen.answer(request, body, session, tenant)
        service.frozen.policy.take(body)
        if session is None and service.run.state == "training":
            asked, listener = await _with_implicit_session(service, request, parse, body, slot)
        else:
            asked, listener = await _parse_and_start(
                service, request, parse, body, session, slot=slot, tenant=tenant
            )
    except BaseException:
        slot.release()
        raise
    listener.slot = slot
    if asked.call.stream:
        return await _stream(service, request, asked, listener)
    return await _whole(service, request, asked, listener)


async def _with_implicit_session(
    service: RankService, request: Request, parse: Parse, body: Any, slot: CallSlot
) -> tuple[ParsedRequest, Listener]:
    """A call of an agent that opens no sessions: of the one that its conversation goes on in, or of
    a new one."""
    caller, found = service.auth.caller(request), service.implicit
    before = body.get("previous_response_id") if isinstance(body, dict) else None
    joined = await found.join_named(caller, before) if isinstance(before, str) else None
    asked = None
    if joined is None:
        # Before a session is looked for, or even opened.
        asked = await _checked(
            parse, ModelCallContext(service, None, SessionMode.TRAIN, body), request
        )
        joined = await found.join(request, body, asked.call, caller, slot)
    try:
        asked, listener = await _parse_and_start(
            service,
            request,
            parse,
            body,
            joined.session,
            slot=slot,
            tenant=caller.tenant,
            asked=asked,
            prepared=joined.prepared,
        )
    except BaseException:
        joined.cancel()
        raise
    joined.on_started(listener)
    return asked, listener


async def _parse_and_start(
    service: RankService,
    request: Request,
    parse: Parse,
    body: Any,
    session: RecordedSession | None,
    *,
    slot: CallSlot,
    tenant: str | None,
    asked: ParsedRequest | None = None,
    prepared: Prepared | None = None,
) -> tuple[ParsedRequest, Listener]:
    """The call, checked and begun, or taken up again."""
    mode = session.mode if session is not None else SessionMode.EVAL
    # What a retry or the prompt finds in the tree stays there until the call has begun.
    with service.sessions.trees.pinned(session) if session is not None else nullcontext():
        if session is not None:
            await service.sessions.load(session)
        if asked is None:
            asked = await _checked(parse, ModelCallContext(service, session, mode, body), request)
        listener = await _begin(
            service, request, asked.call, session, slot=slot, tenant=tenant, prepared=prepared
        )
    return asked, listener


async def _checked(parse: Parse, asking: ModelCallContext, request: Request) -> ParsedRequest:
    size = len(await request.body())
    return await checked(asking.service.completer, partial(parse, asking), size)


async def _session_and_tenant(
    service: RankService, request: Request
) -> tuple[RecordedSession | None, str | None]:
    """The session that a call belongs to, and the tenant that it is charged to."""
    session = await service.auth.session_or_none(request, request.query_params.get("session_id"))
    if session is not None:
        session.require_open()
        return session, session.row.tenant
    caller = service.auth.caller(request)
    if service.run.state == "training" and not service.implicit.accepts(caller):
        raise Unauthenticated(
            "calls belong to a session while training goes on: POST /rl/v1/start_session "
            "(mode train or eval) and use its api_key; "
            "this call came without a key, or with one that belongs to no session",
            code="no_session",
        )
    return None, caller.tenant


async def _begin(
    service: RankService,
    request: Request,
    call: ChatCall,
    session: RecordedSession | None,
    *,
    slot: CallSlot,
    tenant: str | None,
    prepared: Prepared | None,
) -> Listener:
    """The call that the request repeats, or a new one; ``prepared``, if it was already."""
    tree, mark = None, None
    if session is not None:
        tree, mark = session.tree, retry_mark(request, await request.body())
        if mark is not None and mark.retry_count > 0:
            earlier = await join_retried_call(service.calls, session, mark, call)
            if earlier is not None:
                return earlier
    await service.calls.render_turns.wait()
    if prepared is None:
        prepared = await prepare(service.completer, call, tree)
    return service.calls.start(
        prepared, session, stream=call.stream, slot=slot, tenant=tenant, mark=mark
    )


async def _whole(
    service: RankService, request: Request, asked: ParsedRequest, listener: Listener
) -> Response:
    try:
        answers: dict[int, Interaction] = {}
        async with ClientConnection(request, on_leave=listener.disconnect) as client:
            while len(answers) < listener.call.head.choices:
                item = await listener.next()
                if not isinstance(item, Delta):
                    answers[item.index] = item.interaction
            in_order = [answers[k] for k in sorted(answers)]
            version = version_of(in_order, service.run.version)
            answer = asked.answer(listener.call.head, version)
            body = await whole(answer, asked.call, in_order)
            await client.poll()
        response = Response(
            body, headers=_headers(listener, asked.call, version), media_type="application/json"
        )
        if not client.gone:
            for index in answers:
                listener.mark_sent(index)
        return response
    finally:
        await service.calls.release(listener)


async def _stream(
    service: RankService, request: Request, asked: ParsedRequest, listener: Listener
) -> Response:
    # What fails before the first token is an HTTP error, so the first item comes first.
    try:
        async with ClientConnection(request, on_leave=listener.disconnect):
            first = await listener.next()
        version = version_of(list(listener.call.recorded.values()), service.run.version)
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
    request: Request, listener: Listener, answer: ResponseEncoder, item: Item
) -> AsyncGenerator[bytes]:
    """One call's events. A choice is delivered once the event with its finish reason was sent."""
    begun: set[int] = set()
    ended: dict[int, Interaction] = {}
    choices = listener.call.head.choices
    async with ClientConnection(request, on_leave=listener.disconnect) as client:
        await client.poll()
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
                    listener.mark_sent(index)
                if len(ended) == choices:
                    return
            try:
                item = await listener.next()
            except AnyAgentError as error:
                # The status is sent already.
                yield answer.failed(error)
                return


def _headers(listener: Listener, call: ChatCall, version: int) -> dict[str, str]:
    head, session = listener.call.head, listener.call.session
    return headers_of(call, head, version, session.id if session is not None else None)
