"""Model calls over HTTP, of any API: whole answers, or server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from any_agent.auth.access import Caller
from any_agent.completions.apis import Api
from any_agent.completions.call_types import Delta, Prepared
from any_agent.completions.parsed_request import (
    ROLE_HEADER,
    ParseContext,
    ParsedRequest,
    ResponseEncoder,
    encode_whole,
    headers_of,
    role_in,
    version_of,
    with_role,
)
from any_agent.completions.prepare import check_request, prepare
from any_agent.errors import AnyAgentError, RunFinished, Unauthenticated
from any_agent.protocol.error_bodies import request_id_of
from any_agent.types import Interaction, SessionMode
from proxy_ext.auth import bearer_of
from proxy_ext.calls.call import Item, Listener
from proxy_ext.calls.concurrency_limit import CallOwner, CallSlot
from proxy_ext.calls.retries import join_retried_call, retry_mark
from proxy_ext.service import RankService
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.web.exchange import ClientConnection, EventStream, read_json, within_hold

DEPLOYMENT_SCOPE_KEY = "any_agent.deployment"
"""The model that a call's path names, as the paths of Azure's clients do."""
_BATCH = 65_536  # bytes of events that are sent at once, if so many are there


async def serve_model_call(service: RankService, request: Request, api: Api) -> Response:
    """Admit, check, start (or join again) and answer one model call.

    Raises AnyAgentError; an error after the first event ends the stream in its API's form.
    """
    call = ModelCall(service, request, api)
    if service.calls.full:
        # First of all: what is refused for want of a slot must cost next to nothing.
        service.calls.require_slot(_known_owner(service, call.caller))
    await call.authorize()
    # A body takes no slot while it is on its way.
    service.calls.require_slot(call.owner)
    call.body = _with_deployment(await read_json(request), request)
    if await service.frozen.is_named_by(call.body):
        # A frozen model's call uses nothing of the engine.
        response = await service.frozen.answer(
            request, api, call.body, call.session, call.tenant, call.caller, call.role
        )
    else:
        service.frozen.policy.count_call(call.body)
        slot = service.calls.acquire_slot(call.owner)
        try:
            parsed, listener = await call.start(slot)
        except BaseException:
            slot.release()
            raise
        listener.slot = slot
        response = await call.respond(parsed, listener)
    if api.errors.has_request_id:
        response.headers.update(request_id_of(response.headers.get("x-any-agent-interaction", "")))
    return response


def _with_deployment(body: Any, request: Request) -> Any:
    """Return a body with the model that the path names: Azure ignores the body's."""
    model = request.scope.get(DEPLOYMENT_SCOPE_KEY)
    if model is None or not isinstance(body, dict):
        return body
    return {**body, "model": model}


def _known_owner(service: RankService, caller: Caller) -> CallOwner:
    """Return a call's owner as far as its key tells it, without a look at the journal."""
    session = service.sessions.live_by_lane(caller.lane) if caller.lane is not None else None
    if session is None:
        return CallOwner(None, caller.tenant)
    return CallOwner(session.id, session.row.tenant)


class ModelCall:
    """One request for a model call, from its admission to its response."""

    def __init__(self, service: RankService, request: Request, api: Api) -> None:
        self.session: RecordedSession | None = None
        self.tenant: str | None = None
        """The tenant that the call is charged to."""
        self.body: Any = None
        self.role = role_in(request.headers.getlist(ROLE_HEADER))
        self.caller = service.auth.caller(request)
        self._service = service
        self._request = request
        self._api = api

    @property
    def owner(self) -> CallOwner:
        """The session and the tenant among whose slots the call's is counted."""
        return CallOwner(self.session.id if self.session is not None else None, self.tenant)

    async def authorize(self) -> None:
        """Find the session that the call belongs to; require tokens of its tenant's quota."""
        service, request = self._service, self._request
        named = request.query_params.get("session_id")
        self.session = await service.auth.session_or_none(request, named)
        if self.session is not None:
            self.session.require_open()
            self.tenant = self.session.row.tenant
        else:
            caller = self.caller
            if service.run.state == "training" and not service.implicit.accepts(caller):
                given = "its key is no session's" if bearer_of(request) else "it came without a key"
                raise Unauthenticated(
                    f"this call belongs to no session, {given}, and training goes on: POST "
                    "/rl/v1/start_session (mode train or eval) and use its api_key",
                    code="no_session",
                )
            self.tenant = caller.tenant
        await service.quotas.require_tokens(self.tenant)

    async def start(self, slot: CallSlot) -> tuple[ParsedRequest, Listener]:
        """Check the call, and start it or join it again."""
        if self.session is None and self._service.implicit.accepts(self.caller):
            return await self._start_in_implicit_session(slot, self.caller)
        return await self._start(slot)

    async def _start_in_implicit_session(
        self, slot: CallSlot, caller: Caller
    ) -> tuple[ParsedRequest, Listener]:
        """Start a call that names no session in the one that its conversation belongs to, or in a
        new one: an eval session where nothing is trained."""
        implicit, training = self._service.implicit, self._service.run.state == "training"
        mode = SessionMode.TRAIN if training else SessionMode.EVAL
        before = self.body.get("previous_response_id") if isinstance(self.body, dict) else None
        joined = await implicit.join_named(caller, before) if isinstance(before, str) else None
        parsed = None
        if joined is None:
            # Before a session is looked for, or even opened.
            parsed = await self._parse(None, mode)
            if parsed.call.prompts and not training:
                # Nothing is lost to training if it belongs to no session.
                return await self._start(slot, parsed)
            try:
                joined = await implicit.join(
                    self._request, self._api, self.body, parsed.call, caller, slot, mode
                )
            except RunFinished:
                if not training or self._service.run.state == "training":
                    raise
                # Training ended while it waited for a session.
                return await self._start_in_implicit_session(slot, caller)
            if joined.session.mode is not mode:
                # It was opened before training began or ended, and is sampled as its mode asks.
                parsed = None
        self.session, self.tenant = joined.session, caller.tenant
        try:
            parsed, listener = await self._start(slot, parsed, joined.prepared)
        except BaseException:
            joined.cancel()
            raise
        joined.on_started(listener)
        return parsed, listener

    async def _start(
        self,
        slot: CallSlot,
        parsed: ParsedRequest | None = None,
        prepared: Prepared | None = None,
    ) -> tuple[ParsedRequest, Listener]:
        """Start the call, which may be parsed and prepared already."""
        service, session = self._service, self.session
        # What a retry or the prompt finds in the tree stays there until the call has begun.
        with service.sessions.trees.pinned(session) if session is not None else nullcontext():
            if session is not None:
                await service.sessions.load(session)
            if parsed is None:
                mode = session.mode if session is not None else SessionMode.EVAL
                parsed = await self._parse(session, mode)
            call, tree, mark = parsed.call, None, None
            if service.litellm is not None:
                await service.litellm.require_allowed(call)
            if session is not None:
                tree, mark = session.tree, retry_mark(self._request, await self._request.body())
                if mark is not None and mark.retry_count > 0:
                    earlier = await join_retried_call(service.calls, session, mark, call)
                    if earlier is not None:
                        return parsed, earlier
            if service.litellm is not None:
                await service.litellm.require_key(self.tenant, service.config.model.name)
            await service.calls.render_turns.wait()
            if prepared is None:
                prepared = await prepare(service.completer, call, tree)
            listener = service.calls.start(
                prepared,
                session,
                stream=call.stream,
                slot=slot,
                tenant=self.tenant,
                mark=mark,
            )
        return parsed, listener

    async def _parse(self, session: RecordedSession | None, mode: SessionMode) -> ParsedRequest:
        completer, size = self._service.completer, len(await self._request.body())
        context = parse_context(self._service, session, mode)
        parse = partial(self._api.parse, self.body, context)
        return with_role(await check_request(completer, parse, size), self.role)

    async def respond(self, parsed: ParsedRequest, listener: Listener) -> Response:
        """Return the answer of a call that was started; a stream goes on while it is sent."""
        if parsed.call.stream:
            return await self._stream(parsed, listener)
        return await self._whole(parsed, listener)

    async def _whole(self, parsed: ParsedRequest, listener: Listener) -> Response:
        try:
            answers: dict[int, Interaction] = {}
            async with ClientConnection(self._request, on_leave=listener.disconnect) as client:
                while len(answers) < listener.call.head.choices:
                    item = await listener.next()
                    if not isinstance(item, Delta):
                        answers[item.index] = item.interaction
                in_order = [answers[k] for k in sorted(answers)]
                version = version_of(in_order, self._service.run.version)
                encoder = parsed.answer(listener.call.head, version)
                headers = self._headers(parsed, listener, in_order, version)
                body = await encode_whole(encoder, parsed.call, in_order)
                await client.poll()
            response = Response(body, headers=headers, media_type="application/json")
            if not client.gone:
                for index in answers:
                    listener.mark_sent(index)
            return response
        finally:
            await self._service.calls.release(listener)

    async def _stream(self, parsed: ParsedRequest, listener: Listener) -> Response:
        # What fails at once is an HTTP error, so the first item comes first, unless it takes long.
        try:
            async with ClientConnection(self._request, on_leave=listener.disconnect):
                first = await within_hold(listener.next())
            recorded = list(listener.call.recorded.values())
            version = version_of(recorded, self._service.run.version)
            headers = self._headers(parsed, listener, recorded, version)
        except BaseException:
            await self._service.calls.release(listener)
            raise
        return EventStream(
            _events(self._request, listener, partial(self._encoder, parsed, listener), first),
            headers,
            finish=partial(self._service.calls.release, listener),
            send_timeout=self._service.config.server.client_timeout,
            ping=self._api.ping,
        )

    def _encoder(self, parsed: ParsedRequest, listener: Listener) -> ResponseEncoder:
        """Return the encoder of the answer, of which the first token or all is there."""
        recorded = list(listener.call.recorded.values())
        return parsed.answer(listener.call.head, version_of(recorded, self._service.run.version))

    def _headers(
        self, parsed: ParsedRequest, listener: Listener, answers: list[Interaction], version: int
    ) -> dict[str, str]:
        session = listener.call.session
        return headers_of(
            parsed.call,
            listener.call.head,
            version,
            session.id if session is not None else None,
            train=session is not None and session.mode is SessionMode.TRAIN,
            answers=answers,
        )


def parse_context(
    service: RankService, session: RecordedSession | None, mode: SessionMode
) -> ParseContext:
    """Return the facts that a rank's parsers get; the session's tree must be loaded."""
    sampling = service.sampling
    if mode is SessionMode.EVAL and (session is None or session.row.implicit):
        # An agent that opens no session gets what OpenAI's API gives.
        sampling = sampling.new(temperature=1.0)
    elif mode is SessionMode.EVAL:
        sampling = service.eval_sampling
    config, chat = service.config, service.completer.chat
    return ParseContext(
        mode,
        sampling,
        config.model.name,
        chat.renderer.known_settings,
        config.server.unknown_parameters,
        chat=chat,
        context_length=service.completer.context_length,
        tree=session.tree if session is not None else None,
    )


async def _events(
    request: Request,
    listener: Listener,
    new_encoder: Callable[[], ResponseEncoder],
    first: Item | None,
) -> AsyncGenerator[bytes]:
    """Yield a call's events; a choice is sent once the event with its finish reason was.

    ``first``: the first item, if it is there already.
    """
    begun: set[int] = set()
    ended: dict[int, Interaction] = {}
    choices = listener.call.head.choices
    async with ClientConnection(request, on_leave=listener.disconnect) as client:
        await client.poll()
        try:
            item = first or await listener.next()
        except AnyAgentError as error:
            # The status is sent already.
            encoder = new_encoder()
            yield encoder.start(0) + encoder.failed(error)
            return
        encoder = new_encoder()
        while True:
            events: list[bytes] = []
            size = 0
            # What is there already leaves at once, in one piece.
            while isinstance(item, Delta):
                if item.index not in begun:
                    begun.add(item.index)
                    events.append(encoder.start(item.index))
                event = encoder.delta(item)
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
                event = encoder.end(index, item.interaction)
                if index not in begun:
                    event = encoder.start(index) + event
                if len(ended) == choices:
                    event += encoder.last([ended[k] for k in sorted(ended)])
                yield event
                if not client.gone:
                    listener.mark_sent(index)
                if len(ended) == choices:
                    return
            try:
                item = await listener.next()
            except AnyAgentError as error:
                yield encoder.failed(error)
                return
