"""A call at one of LiteLLM's other inference routes: images, speech, ranking and the like. It is
not recorded, but counted for the caller's caps before its answer begins.

It goes on when its client leaves, or its session ends: only with the answer does LiteLLM say what
the call has cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from starlette.types import ASGIApp, Message, Scope, Send

from any_agent.errors import AnyAgentError, ProviderTimeout, ServiceUnavailable
from any_agent.record import frozen_id
from proxy_ext import litellm_proxy
from proxy_ext.frozen.app_call import CACHE_KEY, COST, ask, shown_headers
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.web.exchange import error_response

_Charge = Callable[["RouteCall", float, int], Awaitable[None]]


class RouteCall:
    """One call, which answers its client itself."""

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        body: bytes,
        send: Send,
        session: RecordedSession | None,
        tenant: str | None,
    ) -> None:
        """``scope``: the client's request, as LiteLLM's app gets it."""
        self.session = session
        self.tenant = tenant
        self.task: asyncio.Task[None] | None = None
        self._app = app
        self._scope = scope
        self._body = body
        self._send = send
        self._begun = False

    def start(self, seconds: float, charge: _Charge) -> asyncio.Task[None]:
        """Run the call for some seconds at most.

        ``charge`` makes the answer's cost in USD, and its tokens, count.
        """
        self.task = asyncio.create_task(self._run(seconds, charge))
        return self.task

    def abort(self, reason: str) -> None:
        """Cancel the call, here and at the provider."""
        if self.task is not None:
            self.task.cancel(reason)

    async def _run(self, seconds: float, charge: _Charge) -> None:
        failure: AnyAgentError
        try:
            async with asyncio.timeout(seconds):
                await self._pass_answer(charge)
            return
        except TimeoutError:
            failure = ProviderTimeout(
                f"LiteLLM did not answer within {seconds:g} s (frozen.timeout)"
            )
        except asyncio.CancelledError:
            failure = ServiceUnavailable("the service is stopping")
        except AnyAgentError as error:
            failure = error
        if not self._begun:
            # Otherwise the connection is cut, as the answer lacks its end.
            answer = error_response(failure, self._scope["path"])
            await answer(self._scope, _nothing, self._send)

    async def _pass_answer(self, charge: _Charge) -> None:
        call_id = frozen_id()
        with litellm_proxy.facts_of(call_id) as facts:
            async with aclosing(ask(self._app, self._scope, self._body, call_id)) as answer:
                async for message in answer:
                    if message["type"] == "http.response.start":
                        cost = _cost(dict(message["headers"]))
                        await charge(self, cost, _tokens(facts.usage or {}))
                        self._begun = True
                        shown = {**message, "headers": shown_headers(message, self._scope)}
                        await self._send(without_browsers(shown))
                    else:
                        await self._send({**message, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})


def without_browsers(start: Message) -> Message:
    """Return the start of an answer without what opens it to pages of other origins."""
    headers = [(k, v) for k, v in start["headers"] if not _of_browsers(k)]
    return {**start, "headers": headers}


def _of_browsers(header: bytes) -> bool:
    return header.startswith(b"access-control-") or header == b"server"


def _cost(headers: Mapping[bytes, bytes]) -> float:
    if CACHE_KEY in headers:
        return 0.0
    with suppress(ValueError):
        return max(0.0, float(headers.get(COST, b"0")))
    return 0.0


def _tokens(usage: Mapping[str, Any]) -> int:
    total = usage.get("total_tokens")
    return total if type(total) is int and total > 0 else 0


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
