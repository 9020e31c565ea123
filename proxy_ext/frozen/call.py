"""One call of a frozen model: it runs in a task of its own, and is recorded before its end is sent.

A call that fails or is aborted, but got output or may be charged for, is recorded as aborted with
the cost of its texts: leaving early evades no cap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol, cast

from starlette.requests import Request
from starlette.responses import Response

from any_agent.completions.parsed_request import UNTRAINABLE_HEADER
from any_agent.errors import AnyAgentError, ProviderError, ProviderTimeout, SessionClosed
from any_agent.record import FROZEN_MODEL, frozen_id
from any_agent.runtime.metrics import Histogram
from any_agent.types import SessionMode
from proxy_ext.frozen.provider_requests import FrozenRequest
from proxy_ext.frozen.provider_responses import RESPONSES, json_bytes
from proxy_ext.litellm_shim import LiteLLMDeployment
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.web.exchange import ClientConnection, EventStream, within_hold

log = logging.getLogger(__name__)

OUTCOMES = ("completed", "aborted", "failed")
SECONDS_BOUNDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_MAX_AHEAD = 256
"""Events that wait for a client that reads slowly; beyond that the provider waits, too."""


class FrozenStats:
    """Counters over the calls of frozen models since the process began, by model."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        """Ended calls by model and outcome."""
        self.seconds = Histogram(SECONDS_BOUNDS)
        """Seconds of completed calls, until they are durable."""
        self.tokens: Counter[tuple[str, str]] = Counter()
        """Tokens by model and kind, input or output."""
        self.usd: dict[str, float] = {}
        self.unpriced: Counter[str] = Counter()
        """Calls without a known cost."""
        self.turned_away = 0
        """Calls that were refused because too many were under way."""


class Place(Protocol):
    """The place where a frozen model's call is answered, or was."""

    def cost(self, api: str, usage: Mapping[str, Any]) -> float | None: ...

    def count(self, text: str) -> int: ...


class FrozenCall:
    """One call and its delivery to one client.

    ``record`` makes the call durable; it gets the call, and True if the answer is complete.
    """

    def __init__(
        self,
        request: FrozenRequest,
        deployment: Place,
        session: RecordedSession | None,
        tenant: str | None,
        *,
        timeout: float,
        record: Callable[[FrozenCall, bool], Awaitable[None]],
    ) -> None:
        self.request = request
        self.deployment = deployment
        self.response = RESPONSES[request.api](frozen_id(), request.include_usage)
        self.session = session
        self.tenant = tenant
        self.created_at = time.time()
        self.answer_headers: dict[str, str] = {}
        """Headers of the provider's answer for the client, once its first item is there."""
        self.task: asyncio.Task[None] | None = None
        self.failure: AnyAgentError | None = None
        self._timeout = timeout
        self._record = record
        self._recording = False
        self._aborted: str | None = None
        self._may_be_charged = False
        """True if the provider may charge for the call although it did not answer."""
        self._items: asyncio.Queue[bytes | AnyAgentError] = asyncio.Queue()
        """The client's events, last the end of the answer or the call's failure."""
        self._room = asyncio.Semaphore(_MAX_AHEAD)
        self._ended = False
        """True once the last item is there."""

    def start(self) -> asyncio.Task[None]:
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(self._on_done)
        return self.task

    def abort(self, reason: str) -> None:
        """Cancel the call, here and at the provider; without effect once it is being recorded."""
        if self.task is None or self.task.done() or self._recording or self._aborted is not None:
            return
        self._aborted = reason
        self.task.cancel()

    @property
    def outcome(self) -> str:
        """The outcome, as a label of a metric."""
        if self.failure is None:
            return "completed"
        return "aborted" if self._aborted is not None else "failed"

    async def respond(self, request: Request, *, send_timeout: float, ping: bytes) -> Response:
        """Return the answer, whole or as events; raise the failure of a call without output."""
        headers = {}
        if self.session is not None:
            headers["x-any-agent-interaction"] = self.response.id
            headers["x-any-agent-session"] = self.session.id
            if self.session.mode is SessionMode.TRAIN:
                headers[UNTRAINABLE_HEADER] = FROZEN_MODEL
        # What fails at once is an HTTP error, so the first event comes first, unless it takes long.
        try:
            async with ClientConnection(request, on_leave=self._on_client_left):
                coming = self._next()
                first = await (within_hold(coming) if self.request.stream else coming)
        except BaseException:
            self._on_client_left()
            raise
        headers = {**self.answer_headers, **headers}
        if not self.request.stream:
            return Response(first, headers=headers, media_type="application/json")

        async def finish() -> None:
            self._on_client_left()

        events = self._events(request, first)
        return EventStream(events, headers, finish=finish, send_timeout=send_timeout, ping=ping)

    async def _events(self, request: Request, first: bytes | None) -> AsyncGenerator[bytes]:
        async with ClientConnection(request, on_leave=self._on_client_left):
            if first is not None:
                yield first
            while not (self._ended and self._items.empty()):
                try:
                    event = await self._next()
                except AnyAgentError as error:
                    # The status is sent already.
                    event = self.response.failed(error)
                yield event

    async def _next(self) -> bytes:
        """Return the client's next event; raise the call's failure."""
        item = await self._items.get()
        self._room.release()
        if isinstance(item, AnyAgentError):
            raise item
        return item

    def _on_client_left(self) -> None:
        self.abort("the client left")

    def _on_done(self, _: asyncio.Task[None]) -> None:
        """End a call whose task was cancelled before it began, or while it was recorded."""
        if not self._ended:
            self.failure = self.failure or SessionClosed(self._aborted or "the service is stopping")
            self._end(self.failure)

    def _end(self, last: bytes | AnyAgentError) -> None:
        self._ended = True
        self._items.put_nowait(last)

    async def _run(self) -> None:
        last = b""
        try:
            async with asyncio.timeout(self._timeout):
                last = await self._call_provider()
        except TimeoutError:
            self._may_be_charged = True
            self.failure = ProviderTimeout(
                f"model {self.request.model} did not answer within {self._timeout:g} s "
                "(frozen.timeout)"
            )
        except asyncio.CancelledError:
            self._aborted = self._aborted or "the service is stopping"
            self._may_be_charged = True
            self.failure = SessionClosed(self._aborted)
        except AnyAgentError as error:
            self._may_be_charged = isinstance(error, ProviderTimeout)
            self.failure = error
        except Exception:
            log.exception("a call of the frozen model %s failed", self.request.model)
            self.failure = ProviderError(
                f"the service could not read the answer of model {self.request.model}; see its log"
            )
        self._recording = True
        if self.failure is None or self.response.begun or self._may_be_charged:
            await self._make_durable()
        self._end(self.failure or last)

    async def _call_provider(self) -> bytes:
        """Queue the answer's events; return its end, or the whole body, once all is there."""
        request, response = self.request, self.response
        deployment = cast(LiteLLMDeployment, self.deployment)
        if not request.stream:
            body = await deployment.complete(request.api, request.params, self._timeout)
            return json_bytes(response.whole(body))
        end: list[bytes] = []
        events = deployment.stream(request.api, request.params, self._timeout)
        async with aclosing(events):
            async for event in events:
                data, ends = response.event(event)
                if ends:
                    # Not sent before the call is recorded.
                    end.append(data)
                elif data:
                    await self._room.acquire()
                    self._items.put_nowait(data)
        if not end:
            raise ProviderError(f"the answer of model {request.model} broke off")
        return b"".join([*end, response.done])

    async def _make_durable(self) -> None:
        try:
            await self._record(self, self.failure is None)
        except AnyAgentError as error:
            if self.failure is None:
                self.failure = error
            else:
                log.warning(
                    "could not record a failed call of the frozen model %s: %s",
                    *(self.request.model, error),
                )
        except Exception:
            log.exception("could not record a call of the frozen model %s", self.request.model)
            self.failure = self.failure or AnyAgentError("the call was not recorded; see the log")
