"""An HTTP client for agents that waits while the service is full or away.

Many agents create OpenAI's client with ``max_retries=0``: any refusal during a weight update, by a
full engine or by a restarted rank would end their episode.
"""

from __future__ import annotations

import re
from typing import Any, Self

import httpx

from any_agent.client.aiohttp_transport import AiohttpTransport
from any_agent.client.backoff import Backoff
from any_agent.client.service_url import moved
from any_agent.errors import RUN_STATE_HEADER, seconds_of
from any_agent.keys import KEY_HEADERS, LANE_KEY_PREFIXES, SESSION_KEY_PREFIX, bearers_of

_COUNT = "x-stainless-retry-count"
"""The header by which SDKs mark a repeated call: the service does not sample it twice."""
_BUSY_STATUSES = (429, 503)
_LOST_STATUS = 502
_KEY_IN_PATH = re.compile(
    rb"/(" + re.escape(SESSION_KEY_PREFIX.encode()) + rb"[^/?]+)(/v1(?=/(?:rl|v1)/))?(?=/)"
)
"""A key in a path. After it `/v1/rl` means `/rl`, and `/v1/v1` `/v1`: base URLs end in `/v1`."""
_MAX_WAIT = 60.0  # the longest wait in seconds, even if the service names a longer one


class RetryTransport(httpx.AsyncBaseTransport):
    """Repeats a session's requests while the service is full or away, for ``patience`` seconds.

    Requests without a session key, such as those to other services, pass unchanged.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport, *, patience: float = 300.0) -> None:
        self._inner = inner
        self._patience = patience

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not _has_session_key(request):
            return await self._inner.handle_async_request(request)
        await request.aread()
        backoff = Backoff(self._patience, first=0.1, longest=5.0)
        while True:
            request = _redirect_moved(request)
            named: float | None = None
            try:
                response = await self._inner.handle_async_request(request)
            except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout):
                # This is the agent's own time limit.
                raise
            except httpx.TransportError:
                if not backoff.allows(backoff.delay):
                    raise
            else:
                named = _retry_after(response)
                if RUN_STATE_HEADER in response.headers:
                    backoff.wait_for_run()
                wait = backoff.delay if named is None else named
                if not _is_temporary(response) or not backoff.allows(wait):
                    return response
                await response.aclose()
            await (backoff.wait() if named is None else backoff.wait_at_least(named))
            request.headers[_COUNT] = str(_count(request) + 1)

    async def aclose(self) -> None:
        await self._inner.aclose()


class SharedClient(httpx.AsyncClient):
    """A client that its users cannot close, since many programs close every client they use.

    A session's key in a URL is moved into a header, as logs and errors show URLs.
    """

    def build_request(self, *arguments: Any, **named: Any) -> httpx.Request:
        request = super().build_request(*arguments, **named)
        found = _KEY_IN_PATH.search(request.url.raw_path)
        if found is not None:
            path = request.url.raw_path.replace(found[0], b"", 1)
            request.url = request.url.copy_with(raw_path=path)
            for name in KEY_HEADERS:
                request.headers.pop(name, None)
            request.headers["Authorization"] = f"Bearer {found[1].decode('ascii')}"
        return request

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def aclose(self) -> None:
        pass

    async def end(self) -> None:
        """Close the client; only its owner calls this."""
        await super().aclose()


def retrying_client(*, patience: float = 300.0) -> SharedClient:
    """Return a client for any number of concurrent calls, of the event loop of its first use."""
    # The time-outs of OpenAI's client: a reply may take long, a connection may not.
    timeout = httpx.Timeout(600.0, connect=10.0)
    return SharedClient(
        transport=RetryTransport(AiohttpTransport(), patience=patience),
        timeout=timeout,
        trust_env=False,
    )


def _has_session_key(request: httpx.Request) -> bool:
    headers = request.headers
    plain = [value for name in KEY_HEADERS for value in headers.get_list(name)]
    keys = bearers_of(headers.get_list("authorization"), plain)
    return any(key.startswith(LANE_KEY_PREFIXES) for key in keys)


def _redirect_moved(request: httpx.Request) -> httpx.Request:
    """Return the request, or its copy for the address that the service has moved to."""
    to = moved(str(request.url))
    if to is None:
        return request
    headers = request.headers.copy()
    headers.pop("host", None)
    return httpx.Request(
        request.method, to, headers=headers, content=request.content, extensions=request.extensions
    )


def _is_temporary(response: httpx.Response) -> bool:
    should_retry = response.headers.get("x-should-retry")
    if response.status_code == _LOST_STATUS:
        return bool(should_retry == "true")
    return response.status_code in _BUSY_STATUSES and should_retry != "false"


def _retry_after(response: httpx.Response) -> float | None:
    if response.status_code not in _BUSY_STATUSES:
        return None
    asked = seconds_of(response.headers.get("retry-after"))
    return None if asked is None else min(asked, _MAX_WAIT)


def _count(request: httpx.Request) -> int:
    text = request.headers.get(_COUNT, "0")
    return int(text) if text.isascii() and text.isdigit() else 0
