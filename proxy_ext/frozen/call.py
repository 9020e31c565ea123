"""One call of a frozen model: it runs in a task of its own, and is recorded before its end is sent.

What ended otherwise, after something came of it or was paid for, is recorded as aborted, with what
it cost as far as the texts tell: nobody evades a cap by leaving.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from any_agent.errors import AnyAgentError, ProviderError, ProviderTimeout, SessionClosed
from proxy_ext.frozen.bounded_pipe import BoundedPipe
from proxy_ext.frozen.provider import Deployment
from proxy_ext.frozen.provider_requests import FrozenRequest
from proxy_ext.frozen.provider_responses import ProviderResponse, json_bytes
from proxy_ext.sessions.session import RecordedSession

log = logging.getLogger(__name__)

_AHEAD = 256
"""Events that wait for a client that reads slowly; then the provider waits, too."""


@dataclass(frozen=True, slots=True)
class FrozenCallEnd:
    """The last that a client gets: the whole body, or what ends its stream."""

    data: bytes


class FrozenCall:
    """See the module. ``record``, given the call and whether it is whole, makes it durable."""

    def __init__(
        self,
        request: FrozenRequest,
        deployment: Deployment,
        answer: ProviderResponse,
        session: RecordedSession | None,
        tenant: str | None,
        *,
        timeout: float,
        record: Callable[[FrozenCall, bool], Awaitable[None]],
    ) -> None:
        self.request = request
        self.deployment = deployment
        self.answer = answer
        self.session = session
        self.tenant = tenant
        self.created_at = time.time()
        self.task: asyncio.Task[None] | None = None
        self.failure: AnyAgentError | None = None
        self.pipe: BoundedPipe[bytes | FrozenCallEnd | AnyAgentError] = BoundedPipe(_AHEAD)
        self._timeout = timeout
        self._record = record
        self._recording = False
        self._aborted: str | None = None
        self._told = False
        self._paid = False
        """Whether the provider may charge for it although it did not answer."""

    def start(self) -> None:
        self.task = asyncio.create_task(self._run())
        self.task.add_done_callback(self._over)

    def abort(self, reason: str) -> None:
        """End it, here and at the provider; without effect once it is being recorded."""
        if self.task is None or self.task.done() or self._recording or self._aborted is not None:
            return
        self._aborted = reason
        self.task.cancel()

    @property
    def outcome(self) -> str:
        """How it ended, for a metric."""
        if self.failure is None:
            return "completed"
        return "aborted" if self._aborted is not None else "failed"

    async def next(self) -> bytes | FrozenCallEnd:
        """What the client gets next; raises what it failed with."""
        item = await self.pipe.get()
        if isinstance(item, AnyAgentError):
            raise item
        return item

    # ------------------------------------------------------------------------------------------

    def _over(self, _: asyncio.Task[None]) -> None:
        """One that was cancelled before it began, or while it was recorded, has said nothing."""
        if not self._told:
            self.failure = self.failure or SessionClosed(self._aborted or "the service is stopping")
            self._tell(self.failure)

    def _tell(self, last: FrozenCallEnd | AnyAgentError) -> None:
        self._told = True
        self.pipe.end(last)

    async def _run(self) -> None:
        last = b""
        try:
            async with asyncio.timeout(self._timeout):
                last = await self._ask()
        except TimeoutError:
            self._paid = True
            self.failure = ProviderTimeout(
                f"model {self.request.model} did not answer within {self._timeout:g} s "
                "(frozen.timeout)"
            )
        except asyncio.CancelledError:
            if self._aborted is None:
                self._aborted = "the service is stopping"
            self._paid = True
            self.failure = SessionClosed(self._aborted)
        except AnyAgentError as error:
            self._paid = isinstance(error, ProviderTimeout)
            self.failure = error
        except Exception:
            log.exception("a call of the frozen model %s failed", self.request.model)
            self.failure = ProviderError(
                f"the answer of model {self.request.model} could not be read; the service's log "
                "says why"
            )
        self._recording = True
        if self.failure is None or self.answer.begun or self._paid:
            await self._keep()
        self._tell(self.failure or FrozenCallEnd(last))

    async def _ask(self) -> bytes:
        """The last that the client gets, when all is there."""
        request, answer = self.request, self.answer
        if not request.stream:
            body = await self.deployment.whole(request.api, request.params, within=self._timeout)
            return json_bytes(answer.whole(body))
        held: list[bytes] = []
        events = self.deployment.stream(request.api, request.params, within=self._timeout)
        async with aclosing(events):
            async for event in events:
                data, ends = answer.event(event)
                if ends:
                    # Not before it is recorded.
                    held.append(data)
                elif data:
                    await self.pipe.put(data)
        if not held:
            raise ProviderError(f"the answer of model {request.model} broke off")
        return b"".join([*held, answer.done])

    async def _keep(self) -> None:
        try:
            await self._record(self, self.failure is None)
        except AnyAgentError as error:
            if self.failure is None:
                self.failure = error
            else:
                log.warning("a broken call of %s is not recorded: %s", self.request.model, error)
        except Exception:
            log.exception("a call of the frozen model %s could not be recorded", self.request.model)
            self.failure = self.failure or AnyAgentError("the service failed; its log says why")
