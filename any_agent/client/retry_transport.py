"""An HTTP client for agents that waits where the service asks for it.

Agents are told to make OpenAI's client with ``max_retries=0``, so whatever a weight update, a full
engine or a restarted rank answers in between would end their episode.
"""

from __future__ import annotations

import asyncio
import re
import time
from types import TracebackType
from typing import Any, Self

import httpx

from any_agent.client.backoff import jittered
from any_agent.client.connection_pool import UnpooledTransport
from any_agent.client.service_url import moved
from any_agent.errors import from_response
from any_agent.keys import SESSION_KEY_PREFIX

_COUNT = "x-stainless-retry-count"
"""By which SDKs mark a call that is sent again: the service then samples nothing twice."""
_TURNED_AWAY = (429, 503)
_LOST = 502
_KEY_IN_PATH = re.compile(
    rb"/(" + re.escape(SESSION_KEY_PREFIX.encode()) + rb"[^/?]+)(/v1(?=/(?:rl|v1)/))?(?=/)"
)
"""Behind a key `/v1/rl` is `/rl`, and `/v1/v1` `/v1`: an agent's base URL ends in `/v1`."""
_MAX_WAIT = 60.0
"""Seconds, whatever the service asks for."""


class RetryTransport(httpx.AsyncBaseTransport):
    """Sends a session's requests again while the service is full or away, for ``patience`` seconds.

    Requests that carry no session key, thus those to anybody else, pass as they are.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport, *, patience: float = 300.0) -> None:
        self._inner = inner
        self._patience = patience

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not _of_a_session(request):
            return await self._inner.handle_async_request(request)
        await request.aread()
        deadline = time.monotonic() + self._patience
        delay = 0.1
        while True:
            response: httpx.Response | None = None
            request = _followed(request)
            try:
                response = await self._inner.handle_async_request(request)
                wait = await _wait_asked_for(response, delay)
            except httpx.TransportError as error:
                if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout | httpx.PoolTimeout):
                    # The agent's own limit.
                    raise
                wait = delay
                if time.monotonic() + wait > deadline:
                    raise
            if response is not None:
                if wait is None or time.monotonic() + wait > deadline:
                    return response
                await response.aclose()
            assert wait is not None
            await asyncio.sleep(jittered(wait, 1.0, 1.2))
            delay = min(2 * delay, 5.0)
            request.headers[_COUNT] = str(_count(request) + 1)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)


class SharedClient(httpx.AsyncClient):
    """A client that its users cannot close: some do what they learned, and close what they use.

    A session's key in a URL goes into a header, as logs and errors show URLs.
    """

    def build_request(self, *arguments: Any, **named: Any) -> httpx.Request:
        request = super().build_request(*arguments, **named)
        found = _KEY_IN_PATH.search(request.url.raw_path)
        if found is not None:
            path = request.url.raw_path.replace(found[0], b"", 1)
            request.url = request.url.copy_with(raw_path=path)
            for name in ("x-api-key", "api-key"):
                request.headers.pop(name, None)
            request.headers["Authorization"] = f"Bearer {found[1].decode('ascii')}"
        return request

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        pass

    async def aclose(self) -> None:
        pass

    async def end(self) -> None:
        """What its owner closes it with."""
        await super().aclose()


def retrying_client(*, patience: float = 300.0) -> SharedClient:
    """A client for any number of agents' calls at once, of the event loop it is used in first."""
    # OpenAI's own: a long answer takes its time; connecting does not.
    timeout = httpx.Timeout(600.0, connect=10.0)
    return SharedClient(
        transport=RetryTransport(UnpooledTransport(), patience=patience),
        timeout=timeout,
        trust_env=False,
    )


def _of_a_session(request: httpx.Request) -> bool:
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    key = bearer or request.headers.get("x-api-key", "")
    return bool(key.startswith(SESSION_KEY_PREFIX))


def _followed(request: httpx.Request) -> httpx.Request:
    """The same, or one to where the service has moved."""
    to = moved(str(request.url))
    if to is None:
        return request
    headers = request.headers.copy()
    headers.pop("host", None)
    return httpx.Request(
        request.method, to, headers=headers, content=request.content, extensions=request.extensions
    )


async def _wait_asked_for(response: httpx.Response, delay: float) -> float | None:
    """Seconds until the same request may be sent again; None for what is the answer."""
    status = response.status_code
    if status == _LOST and response.headers.get("x-should-retry") == "true":
        return delay
    if status not in _TURNED_AWAY or response.headers.get("x-should-retry") == "false":
        return None
    asked = from_response(status, b"", response.headers.get("retry-after")).retry_after
    return min(delay if asked is None else asked, _MAX_WAIT)


def _count(request: httpx.Request) -> int:
    text = request.headers.get(_COUNT, "0")
    return int(text) if text.isdigit() else 0
