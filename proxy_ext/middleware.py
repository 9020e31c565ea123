"""The checks in front of every route: limits, the session prefix, LiteLLM's allowlist, and keys.

A request whose key has no right to its route never reaches the route, nor is its body read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from any_agent.auth.access import (
    CLIENT_HEADER,
    authorize,
    require_loopback_client,
)
from any_agent.auth.access import Scope as KeyScope
from any_agent.auth.audit_log import AuditLog
from any_agent.completions.apis import NO_WEBSOCKET, plain_path, require_no_websocket
from any_agent.config import ServerConfig
from any_agent.errors import (
    AnyAgentError,
    Forbidden,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    NoWebSocket,
    PayloadTooLarge,
    Unauthenticated,
)
from any_agent.keys import key_id, session_prefix
from any_agent.protocol.rl import API_HEADER, API_VERSION
from any_agent.runtime.content_coding import BodyDecoder
from any_agent.runtime.logs import Redactor
from any_agent.runtime.request_limits import BodyTimeout, RequestLimits, Reservation
from proxy_ext.api.model_call import DEPLOYMENT_SCOPE_KEY
from proxy_ext.auth import PREFIX_SCOPE_KEY, SESSIONS_SCOPE_KEY, Authenticator, bearer_of
from proxy_ext.litellm_gate import LiteLLMGate
from proxy_ext.web.exchange import JSONResponse, error_response
from proxy_ext.web.permissions import LITELLM_ALIVE, RULES, RouteRule, methods_of, template_of

_redact = Redactor().text
_MAX_HEADER_BYTES = 32_768
_CODING = b"content-encoding"
_VERSION_HEADER = (API_HEADER.encode(), API_VERSION.encode())


class EntryMiddleware:
    """An ASGI app that passes checked requests to ours, or through the gate to LiteLLM's."""

    def __init__(
        self,
        ours: ASGIApp,
        *,
        auth: Callable[[], Authenticator],
        audit: Callable[[], AuditLog],
        server: ServerConfig,
        gate: LiteLLMGate | None = None,
    ) -> None:
        """``gate``: the way to LiteLLM's own routes, where they are served."""
        self.ours = ours
        """The app of our own routes."""
        self._auth = auth
        self._audit = audit
        self._gate = gate
        self._max_body_bytes = server.max_body_bytes
        self._part_timeout = server.client_timeout
        self._body_timeout = server.body_timeout
        self.limits = RequestLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.ours(scope, receive, send)
            return
        if scope["type"] != "http":
            # What has no WebSocket library gets such a request as plain HTTP.
            await _refuse_websocket(scope, send)
            return
        if "/rl/" in scope["path"]:
            send = _with_version(send)
        try:
            reservation = self.limits.acquire()
        except AnyAgentError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        try:
            await self._answer(scope, self._body(scope, receive, reservation), send, reservation)
        finally:
            reservation.release()

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, reservation: Reservation
    ) -> None:
        try:
            self._check(scope)
        except AnyAgentError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        scope = _without_prefix(_without_coding(scope))
        scope = _in_plain_form(scope, litellm=self._gate is not None)
        method, path = scope["method"], scope["path"]
        if method == "GET":
            try:
                upgrade = next(iter(_texts(scope["headers"], b"upgrade")), None)
                require_no_websocket(method, path, upgrade)
            except AnyAgentError as error:
                await error_response(error, path)(scope, receive, send)
                return
        if (method, path) in LITELLM_ALIVE:
            # With any key: LiteLLM's import takes 220 MB and many seconds.
            await JSONResponse("I'm alive!")(scope, receive, send)
            return
        app, template = self.ours, template_of(path)
        rule = None if template is None else RULES.get((method, template))
        if self._gate is not None:
            if template is None and (found := self._gate.rule(method, path)) is not None:
                template, rule = found
                app = partial(self._gate.serve, rule)
            elif rule is not None and self._gate.takes_over(Request(scope)):
                app = partial(self._gate.serve, rule)
        if app is self.ours:
            scope = _as_json(scope)
        if template is None:
            missing = NotFound(_not_found(path))
            await error_response(missing, path)(scope, receive, send)
            return
        if rule is None:
            wrong = MethodNotAllowed.of(method, _redact(path)[:200], methods_of(template))
            await error_response(wrong, path)(scope, receive, send)
            return
        await self._serve(template, rule, app, scope, receive, send, reservation)

    async def _serve(
        self,
        template: str,
        rule: RouteRule,
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
        reservation: Reservation,
    ) -> None:
        """Pass a request on to an app if its key is good for the route."""
        request = Request(scope)
        try:
            await self._authorize(request, rule, reservation)
        except AnyAgentError as error:
            if isinstance(error, Unauthenticated | Forbidden):
                self._log_refusal(request, template, error)
            await error_response(error, scope["path"])(scope, receive, send)
            return
        if rule.audited:
            send = self._audited(request, template, send)
        await app(scope, receive, send)

    async def _authorize(self, request: Request, rule: RouteRule, reservation: Reservation) -> None:
        # A route that needs no key is open to a request with a wrong one.
        if KeyScope.NONE not in rule.scopes:
            caller = await self._auth().admit(request)
            authorize(rule.scopes, caller)
            if caller.scope in (KeyScope.SESSION, KeyScope.JUDGE, KeyScope.TENANT):
                reservation.charge_to(caller.identity)

    def _log_refusal(self, request: Request, template: str, error: AnyAgentError) -> None:
        who: dict[str, str | None] = {}
        if isinstance(error, Forbidden):
            caller = self._auth().caller(request)
            who = {"who": caller.name, "key": caller.identity}
        elif PREFIX_SCOPE_KEY not in request.scope:
            # So that the user of a revoked key can be found.
            who = {"claimed": key_id(bearer_of(request))}
        self._audit().refusal(
            error.code, **who, **self._where(request, template), status=error.status
        )

    def _audited(self, request: Request, template: str, send: Send) -> Send:
        """Wrap ``send`` so that the answer is written to the audit log."""
        caller = self._auth().caller(request)

        async def send_and_log(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._audit().use(
                    who=caller.name,
                    key=caller.identity,
                    sessions=request.scope.get(SESSIONS_SCOPE_KEY, ()),
                    status=message["status"],
                    **self._where(request, template),
                )
            await send(message)

        return send_and_log

    def _where(self, request: Request, template: str) -> dict[str, Any]:
        client, named = request.client, request.headers.get(CLIENT_HEADER)
        return {
            "route": f"{request.method} {template}",
            "client": client.host if client is not None else None,
            # Believed only of the run's own router: anybody may send the header.
            "for": self._auth().access.signer.client_in(named) if named is not None else None,
        }

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        if sum(len(k) + len(v) for k, v in headers) > _MAX_HEADER_BYTES:
            raise PayloadTooLarge(
                f"the request's headers exceed {_MAX_HEADER_BYTES} bytes; send shorter ones"
            )
        values = dict(headers)
        # Blanks around it are part of HTTP's syntax; the parser leaves those behind it.
        length = values.get(b"content-length", b"0").strip(b" \t")
        if not length.isdigit():
            raise InvalidRequest("Content-Length must be a number of bytes; correct the client")
        if int(length) > self._max_body_bytes:
            raise self._too_large()
        if self._auth().access.open_mode:
            require_loopback_client(
                hosts=_texts(headers, b"host"),
                origins=_texts(headers, b"origin"),
                fetch_sites=_texts(headers, b"sec-fetch-site"),
            )

    def _body(self, scope: Scope, receive: Receive, reservation: Reservation) -> Receive:
        """Return what receives the body, bounded in size and time, and decoded."""
        codings = _texts(scope["headers"], _CODING)
        if not codings:
            return self._limited(receive, reservation)
        return self._decoded(self._limited(receive, None), reservation, codings)

    def _decoded(
        self, receive: Receive, reservation: Reservation, codings: Iterable[str]
    ) -> Receive:
        """Decode the body, and count and bound the bytes that it stands for."""
        pieces: Iterator[bytes] = iter(())
        decoder: BodyDecoder | None = None
        size = 0
        last = complete = False

        async def decoded() -> Message:
            nonlocal pieces, decoder, size, last, complete
            while not complete:
                piece = next(pieces, None)
                if piece is not None:
                    size += len(piece)
                    if size > self._max_body_bytes:
                        raise self._too_large()
                    reservation.add(len(piece))
                    # Others have their turn between two pieces.
                    await asyncio.sleep(0)
                    return _part(piece, more=True)
                if last:
                    if decoder is not None:
                        decoder.finish()
                    complete = True
                    return _part(b"", more=False)
                message = await receive()
                if message["type"] != "http.request":
                    return message
                last = not message.get("more_body", False)
                if part := message.get("body"):
                    decoder = decoder or BodyDecoder(codings)
                    pieces = decoder.pieces(part)
            return await receive()

        return decoded

    def _limited(self, receive: Receive, reservation: Reservation | None) -> Receive:
        """Count the body's bytes, and bound the time of each part of it and of the whole.

        Without a reservation the bytes are bounded, and not held.
        """
        size = 0
        complete = False
        timeout = BodyTimeout(part=self._part_timeout, whole=self._body_timeout)

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()
            message = await timeout.within(receive())
            part = len(message.get("body", b""))
            size += part
            if size > self._max_body_bytes:
                raise self._too_large()
            if reservation is not None:
                reservation.add(part)
            complete = not message.get("more_body", False)
            return message

        return limited

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the body exceeds server.max_body_bytes ({self._max_body_bytes} bytes); send less"
        )


def _part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def _with_version(send: Send) -> Send:
    """Wrap ``send`` so that the answer's headers give the version of the `/rl` routes."""

    async def versioned(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], _VERSION_HEADER]}
        await send(message)

    return versioned


def _not_found(path: str) -> str:
    message = f"there is no route {_redact(path)[:200]}"
    if path.startswith("/v1/v1/"):
        return (
            f"{message}: the base URL of Anthropic's clients must not end in /v1, which they add "
            "themselves; that of OpenAI's ends in one /v1"
        )
    return message


def _texts(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


def _without_prefix(scope: Scope) -> Scope:
    prefix = session_prefix(scope["path"])
    if prefix is None:
        return scope
    path = scope["path"].removeprefix(f"/{prefix}")
    if path.startswith(("/v1/rl/", "/v1/v1/")):
        # An agent may know only its base URL, which ends in /v1; Anthropic's client adds another.
        path = path.removeprefix("/v1")
    return {**scope, "path": path, "raw_path": None, PREFIX_SCOPE_KEY: prefix}


def _without_coding(scope: Scope) -> Scope:
    """Remove the headers of an encoded body, which is decoded when it is received."""
    if not _texts(scope["headers"], _CODING):
        return scope
    encoded = (_CODING, b"content-length")
    return {**scope, "headers": [(k, v) for k, v in scope["headers"] if k not in encoded]}


async def _refuse_websocket(scope: Scope, send: Send) -> None:
    """Refuse a WebSocket before it is one, with the same answer as a request that asks for one."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    path, _ = plain_path(scope["path"])
    response = error_response(NoWebSocket(NO_WEBSOCKET), path)
    head = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "websocket.http.response.start", **head})
    await send({"type": "websocket.http.response.body", "body": response.body})


def _in_plain_form(scope: Scope, *, litellm: bool) -> Scope:
    """Return a request of Azure's clients as OpenAI's own client sends it; others unchanged."""
    path, model = plain_path(scope["path"], litellm=litellm)
    if path == scope["path"]:
        return scope
    return {**scope, "path": path, "raw_path": None, DEPLOYMENT_SCOPE_KEY: model}


def _as_json(scope: Scope) -> Scope:
    """Set the content type to JSON, as all bodies of our routes are, whatever curl sends."""
    headers = [(k, v) for k, v in scope["headers"] if k != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
