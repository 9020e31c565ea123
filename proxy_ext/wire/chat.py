"""`/v1/chat/completions`, whole and streaming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from any_agent.completions import Completed, Completion, Delta, Prepared, parse_chat
from any_agent.errors import AnyAgentError, Unauthenticated
from any_agent.types import SessionMode
from proxy_ext.calls import Call
from proxy_ext.service import Service
from proxy_ext.session import Session
from proxy_ext.wire.http import Client, EventStream, JSONResponse, read_json

_LONG_BODY = 65_536


async def chat_completions(service: Service, request: Request) -> Response:
    """One model call of a session, or, where nothing is trained, of nobody's."""
    session = await service.auth.session_or_none(request, request.query_params.get("session_id"))
    if session is not None:
        session.require_open()
    elif service.run.state == "training":
        raise Unauthenticated(
            "calls belong to a session while training goes on: POST /rl/v1/start_session "
            "(mode train or eval) and use its api_key",
            code="no_session",
        )
    mode = session.mode if session is not None else SessionMode.EVAL
    body = await read_json(request)
    call = parse_chat(body, mode=mode, sampling=service.sampling, model=service.config.model.name)
    tree = session.tree if session is not None else None
    if len(await request.body()) > _LONG_BODY:
        # Rendering a megabyte takes a second: not on the event loop.
        prepared = await asyncio.to_thread(service.completer.prepare, call, tree)
    else:
        prepared = service.completer.prepare(call, tree)
    running = service.calls.start(prepared, session, stream=call.stream)
    answer = _Answer(service, prepared, session)
    if call.stream:
        return await _stream(service, request, running, answer)
    return await _whole(service, request, running, answer)


async def _whole(service: Service, request: Request, call: Call, answer: _Answer) -> Response:
    try:
        async with Client(request, on_leave=call.client_left) as client:
            completion = await call.next()
            assert isinstance(completion, Completion)
            call.delivered = not client.gone
            return JSONResponse(answer.whole(completion), headers=answer.headers(completion))
    finally:
        await service.calls.release(call)


async def _stream(service: Service, request: Request, call: Call, answer: _Answer) -> Response:
    # What fails before the first token is an HTTP error, so the first item comes first.
    try:
        async with Client(request, on_leave=call.client_left):
            first = await call.next()
    except BaseException:
        await service.calls.release(call)
        raise

    async def finish() -> None:
        await service.calls.release(call)

    return EventStream(
        _events(request, call, answer, first),
        answer.headers(None),
        finish=finish,
        send_timeout=service.config.server.client_timeout,
    )


async def _events(
    request: Request, call: Call, answer: _Answer, item: Completed
) -> AsyncGenerator[bytes]:
    """One call's events; delivered once the one with the finish reason was sent."""
    async with Client(request, on_leave=call.client_left) as client:
        yield answer.chunk({"role": "assistant", "content": ""})
        while isinstance(item, Delta):
            event = answer.delta(item)
            if event:
                yield event
            try:
                item = await call.next()
            except AnyAgentError as error:
                # The status is sent already: an error event ends the stream, without [DONE].
                yield _event(error.body())
                return
        for event in answer.ending(item):
            yield event
            call.delivered = call.delivered or not client.gone


class _Answer:
    """Formats one call's answer."""

    def __init__(self, service: Service, prepared: Prepared, session: Session | None) -> None:
        self._service = service
        self._prepared = prepared
        self._session = session
        call = prepared.call
        self._base = {
            "id": prepared.id,
            "created": int(prepared.created_at),
            "model": call.model,
        }

    def headers(self, completion: Completion | None) -> dict[str, str]:
        version = self._service.run.version
        if completion is not None and len(completion.interaction.output_versions):
            version = int(completion.interaction.output_versions[-1])
        out = {
            "x-any-agent-interaction": self._prepared.id,
            "x-any-agent-version": str(version),
        }
        if self._session is not None:
            out["x-any-agent-session"] = self._session.id
        if self._prepared.call.overrides:
            used = {key: getattr(self._prepared.gconfig, key, None) for key in self._overridden}
            out["x-any-agent-overrides"] = json.dumps(used)
        return out

    @property
    def _overridden(self) -> list[str]:
        return sorted(self._prepared.call.overrides)

    def whole(self, completion: Completion) -> dict[str, Any]:
        interaction = completion.interaction
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"refusal": None, **completion.parsed.to_message()},
            "finish_reason": interaction.finish_reason,
            "logprobs": None,
        }
        if self._prepared.call.logprobs:
            choice["logprobs"] = self._logprobs(
                interaction.output_ids.tolist(), interaction.output_logprobs.tolist()
            )
        return {
            **self._base,
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._usage(completion),
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
        if self._prepared.call.logprobs and item.output_ids:
            logprobs = self._logprobs(item.output_ids, item.logprobs)
        if not delta and logprobs is None:
            return b""
        return self.chunk(delta, logprobs=logprobs)

    def ending(self, completion: Completion) -> list[bytes]:
        """The finish reason, the usage if asked for, and the end."""
        out = [self.chunk({}, finish_reason=completion.interaction.finish_reason)]
        if self._prepared.call.include_usage:
            usage = {"choices": [], "usage": self._usage(completion)}
            out.append(_event({**self._base, "object": "chat.completion.chunk", **usage}))
        return [*out, b"data: [DONE]\n\n"]

    def _usage(self, completion: Completion) -> dict[str, Any]:
        prompt = len(self._prepared.prompt_ids)
        output = len(completion.interaction.output_ids)
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
