"""What stands in front of every route: limits, the session prefix, and LiteLLM's allowlist."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from any_agent.errors import AnyAgentError, PayloadTooLarge
from any_agent.keys import session_prefix
from any_agent.loopback import require_local
from proxy_ext.auth import PREFIX_SCOPE_KEY

LITELLM_PATHS = frozenset({"/health/liveliness", "/health/liveness"})
"""All that LiteLLM's own app may answer; its debug, settings, key and UI routes do not exist."""

_MAX_HEADER_BYTES = 32_768


class Front:
    """An ASGI app over ours and LiteLLM's."""

    def __init__(
        self,
        ours: ASGIApp,
        litellm: ASGIApp,
        *,
        max_body_bytes: int,
        body_timeout: float,
        loopback_only: bool,
    ) -> None:
        self._ours = ours
        self._litellm = litellm
        self._max_body_bytes = max_body_bytes
        self._body_timeout = body_timeout
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._ours(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            self._check(scope)
        except AnyAgentError as error:
            await send_error(send, error)
            return
        scope = _as_json(_without_prefix(scope))
        if scope["path"] in LITELLM_PATHS:
            await self._litellm(scope, self._limited(receive), send)
            return
        await self._ours(scope, self._limited(receive), send)

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        if sum(len(k) + len(v) for k, v in headers) > _MAX_HEADER_BYTES:
            raise PayloadTooLarge("the request's headers are too large")
        values = dict(headers)
        length = values.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            raise self._too_large()
        if self._loopback_only:
            require_local(
                hosts=_texts(headers, b"host"),
                origins=_texts(headers, b"origin"),
                fetch_sites=_texts(headers, b"sec-fetch-site"),
            )

    def _limited(self, receive: Receive) -> Receive:
        """Count the body's bytes and bound the wait for each part of it."""
        size = 0
        complete = False

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout(self._body_timeout):
                    message = await receive()
            except TimeoutError:
                return {"type": "http.disconnect"}
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise self._too_large()
            complete = not message.get("more_body", False)
            return message

        return limited

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the body exceeds server.max_body_bytes ({self._max_body_bytes} bytes)"
        )


def _texts(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


def _without_prefix(scope: Scope) -> Scope:
    """Take `/{session}` off the path."""
    prefix = session_prefix(scope["path"])
    if prefix is None:
        return scope
    path = scope["path"].removeprefix(f"/{prefix}")
    return {**scope, "path": path, "raw_path": None, PREFIX_SCOPE_KEY: prefix}


def _as_json(scope: Scope) -> Scope:
    """Every body of ours is JSON, whatever curl calls it."""
    headers = [(k, v) for k, v in scope["headers"] if k != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


async def send_error(send: Send, error: AnyAgentError) -> None:
    """Answer an error in OpenAI's shape, below any framework."""
    body = orjson.dumps(error.body())
    headers: dict[str, Any] = {"content-type": "application/json", **error.headers()}
    headers["content-length"] = str(len(body))
    raw = [(k.lower().encode(), str(v).encode()) for k, v in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
