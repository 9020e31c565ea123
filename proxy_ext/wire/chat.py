"""`/v1/chat/completions`, whole and streaming."""

from __future__ import annotations

import json
import logging
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

log = logging.getLogger(__name__)


async def chat_completions(service: Service, request: Request) -> Response:
    """One model call of a session, or, where nothing is trained, of nobody's."""
    session = await service.auth.session_or_none(request)
    if session is not None:
        session.require_open()
    elif service.run.state == "training":
        raise Unauthenticated(
            "calls belong to a session while training goes on: POST /rl/v1/start_session "
            "(mode train or eval) and use its api_key",
            code="no_session",
        )
    mode = session.mode if session is not None else SessionMode.EVAL
    call = parse_chat(
        await read_json(request),
        mode=mode,
        sampling=service.sampling,
        model=service.config.model.name,
    )
    prepared = service.completer.prepare(call, session.tree if session is not None else None)
    running = service.calls.start(prepared, session, stream=call.stream)
    answer = _Answer(service, prepared, session)
    if call.stream:
        return await _stream(service, request, running, answer)
    return await _whole(service, request, running, answer)


async def _whole(service: Service, request: Request, call: Call, answer: _Answer) -> Response:
    async with Client(request, on_leave=call.client_left) as client:
        try:
            completion = await anext(call.items())
        except BaseException:
            call.client_left()
            raise
        assert isinstance(completion, Completion)
        if client.gone:
            await service.calls.undelivered(call, completion)
        return JSONResponse(answer.whole(completion), headers=answer.headers(completion))


async def _stream(service: Service, request: Request, call: Call, answer: _Answer) -> Response:
    # What fails before the first token is an HTTP error, so the first item comes first.
    try:
        async with Client(request, on_leave=call.client_left):
            first = await anext(call.items())
    except BaseException:
        call.client_left()
        raise
    stream = _Stream(service, request, call, answer, first)
    return EventStream(
        stream.events(),
        answer.headers(None),
        finish=stream.finish,
        send_timeout=service.config.server.client_timeout,
    )


class _Stream:
    """One call's events. An answer whose end was not sent to a present client is undelivered."""

    def __init__(
        self, service: Service, request: Request, call: Call, answer: _Answer, first: Completed
    ) -> None:
        self._service = service
        self._request = request
        self._call = call
        self._answer = answer
        self._first = first
        self._delivered = False

    async def events(self) -> AsyncGenerator[bytes]:
        answer = self._answer
        async with Client(self._request, on_leave=self._call.client_left) as client:
            yield answer.chunk({"role": "assistant", "content": ""})
            item = self._first
            items = self._call.items()
            while isinstance(item, Delta):
                event = answer.delta(item)
                if event:
                    yield event
                try:
                    item = await anext(items)
                except AnyAgentError as error:
                    # The status is sent already: an error event ends the stream, without [DONE].
                    yield _event(error.body())
                    return
            for event in answer.ending(item):
                yield event
            self._delivered = not client.gone

    async def finish(self) -> None:
        if self._delivered:
            return
        self._call.client_left()
        completion = await self._call.result()
        if completion is not None:
            await self._service.calls.undelivered(self._call, completion)


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
