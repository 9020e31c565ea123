"""`/v1/chat/completions`, whole and streaming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from any_agent.completions import ChatCall, Delta, parse_chat
from any_agent.errors import AnyAgentError, Unauthenticated
from any_agent.types import Interaction, SessionMode
from proxy_ext.calls.call import Head, Item, Listener
from proxy_ext.calls.inflight import Place
from proxy_ext.calls.retries import mark_of, take_up
from proxy_ext.service import Service
from proxy_ext.sessions.session import Session
from proxy_ext.wire.http import Client, EventStream, JSONResponse, read_json

_LONG_BODY = 65_536


async def chat_completions(service: Service, request: Request) -> Response:
    """One model call of a session, or, where nothing is trained, of nobody's."""
    # First of all: what is refused for want of a place must cost next to nothing.
    place = service.calls.enter()
    try:
        session, tenant = await _whose(service, request)
        service.quotas.require_tokens(tenant)
        mode = session.mode if session is not None else SessionMode.EVAL
        body = await read_json(request)
        call = parse_chat(
            body, mode=mode, sampling=service.sampling, model=service.config.model.name
        )
        listener = await _begin(service, request, call, session, place=place, tenant=tenant)
    except BaseException:
        place.leave()
        raise
    listener.place = place
    answer = _Answer(service, call, listener.call.head, session)
    if call.stream:
        return await _stream(service, request, listener, answer)
    return await _whole(service, request, listener, answer)


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
    content = await request.body()
    # What a retry or the prompt finds in the tree stays there until the call has begun.
    with service.sessions.trees.pinned(session) if session is not None else nullcontext():
        tree, mark = None, None
        if session is not None:
            await service.sessions.load(session)
            tree, mark = session.tree, mark_of(request, content)
            if mark is not None and mark.retry_count > 0:
                earlier = await take_up(service.calls, session, mark, call)
                if earlier is not None:
                    return earlier
        if len(content) > _LONG_BODY:
            # Rendering a megabyte takes a second: not on the event loop.
            prepared = await asyncio.to_thread(service.completer.prepare, call, tree)
        else:
            prepared = service.completer.prepare(call, tree)
        return service.calls.start(
            prepared, session, stream=call.stream, place=place, tenant=tenant, mark=mark
        )


async def _whole(
    service: Service, request: Request, listener: Listener, answer: _Answer
) -> Response:
    try:
        async with Client(request, on_leave=listener.leave) as client:
            interaction = await listener.next()
            await client.look()
        assert isinstance(interaction, Interaction)
        response = JSONResponse(answer.whole(interaction), headers=answer.headers(interaction))
        listener.delivered = not client.gone
        return response
    finally:
        await service.calls.release(listener)


async def _stream(
    service: Service, request: Request, listener: Listener, answer: _Answer
) -> Response:
    # What fails before the first token is an HTTP error, so the first item comes first.
    try:
        async with Client(request, on_leave=listener.leave):
            first = await listener.next()
    except BaseException:
        await service.calls.release(listener)
        raise

    async def finish() -> None:
        await service.calls.release(listener)

    return EventStream(
        _events(request, listener, answer, first),
        answer.headers(listener.call.interaction),
        finish=finish,
        send_timeout=service.config.server.client_timeout,
    )


async def _events(
    request: Request, listener: Listener, answer: _Answer, item: Item
) -> AsyncGenerator[bytes]:
    """One call's events; delivered once the one with the finish reason was sent."""
    async with Client(request, on_leave=listener.leave) as client:
        await client.look()
        yield answer.chunk({"role": "assistant", "content": ""})
        while isinstance(item, Delta):
            event = answer.delta(item)
            if event:
                yield event
            try:
                item = await listener.next()
            except AnyAgentError as error:
                # The status is sent already: an error event ends the stream, without [DONE].
                yield _event(error.body())
                return
        for event in answer.ending(item):
            yield event
            listener.delivered = listener.delivered or not client.gone


class _Answer:
    """Formats one call's answer."""

    def __init__(
        self, service: Service, call: ChatCall, head: Head, session: Session | None
    ) -> None:
        self._service = service
        self._call = call
        self._head = head
        self._session = session
        self._base = {"id": head.id, "created": int(head.created_at), "model": call.model}

    def headers(self, interaction: Interaction | None) -> dict[str, str]:
        version = self._service.run.version
        if interaction is not None and len(interaction.output_versions):
            version = int(interaction.output_versions[-1])
        out = {
            "x-any-agent-interaction": self._head.id,
            "x-any-agent-version": str(version),
        }
        if self._session is not None:
            out["x-any-agent-session"] = self._session.id
        if self._call.overrides:
            overridden = sorted(self._call.overrides)
            used = {key: getattr(self._head.gconfig, key, None) for key in overridden}
            out["x-any-agent-overrides"] = json.dumps(used)
        return out

    def whole(self, interaction: Interaction) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"refusal": None, **interaction.output_message},
            "finish_reason": interaction.finish_reason,
            "logprobs": None,
        }
        if self._call.logprobs:
            choice["logprobs"] = self._logprobs(
                interaction.output_ids.tolist(), interaction.output_logprobs.tolist()
            )
        return {
            **self._base,
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._usage(interaction),
        }

    def chunk(
        self,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return _event({**self._base, "object": "chat.completion.chunk", "choices": [choice]})

    def delta(self, item: Delta) -> bytes:
        message = item.message
        fields = {
            "content": message.content,
            "reasoning_content": message.reasoning_content,
            "tool_calls": message.tool_calls,
        }
        delta = {key: value for key, value in fields.items() if value}
        logprobs = None
        if self._call.logprobs and item.output_ids:
            logprobs = self._logprobs(item.output_ids, item.logprobs)
        if not delta and logprobs is None:
            return b""
        return self.chunk(delta, logprobs=logprobs)

    def ending(self, interaction: Interaction) -> list[bytes]:
        """The finish reason, the usage if asked for, and the end."""
        out = [self.chunk({}, finish_reason=interaction.finish_reason)]
        if self._call.include_usage:
            usage = {"choices": [], "usage": self._usage(interaction)}
            out.append(_event({**self._base, "object": "chat.completion.chunk", **usage}))
        return [*out, b"data: [DONE]\n\n"]

    def _usage(self, interaction: Interaction) -> dict[str, Any]:
        prompt = self._head.prompt_tokens
        output = len(interaction.output_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }

    def _logprobs(self, ids: list[int], logprobs: list[float]) -> dict[str, Any]:
        chat = self._service.completer.chat
        content = []
        for token, logprob in zip(ids, logprobs, strict=True):
            text = chat.token_text(token)
            content.append(
                {
                    "token": text,
                    "logprob": logprob,
                    "bytes": list(text.encode("utf-8", "replace")),
                    "top_logprobs": [],
                }
            )
        return {"content": content, "refusal": None}


def _event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
