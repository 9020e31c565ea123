"""Model calls under way: each runs in its own task, is recorded, and reports to its caller."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from any_agent.completions import Completed, Completer, Completion, Prepared
from any_agent.errors import AnyAgentError, SessionClosed, TooManyRequests
from proxy_ext.call_stats import CallStats, CallTimer
from proxy_ext.draining import draining
from proxy_ext.session import Session
from proxy_ext.sessions import Sessions

log = logging.getLogger(__name__)


class Call:
    """One model call. Its items end with a Completion that is durable, or with an error."""

    def __init__(self, prepared: Prepared, session: Session | None, timer: CallTimer) -> None:
        self.prepared = prepared
        self.session = session
        self._timer = timer
        self.task: asyncio.Task[None] | None = None
        self._items: asyncio.Queue[Completed | AnyAgentError] = asyncio.Queue()
        self._recording = False
        self._aborted: str | None = None
        self.completion: Completion | None = None
        """Durable; None while the call is under way, and for good if it fails."""
        self.delivered = False
        """Whether the client was there when the event that ends the answer was sent."""

    def abort(self, reason: str) -> None:
        """Cancel the generation; without effect once the answer is being recorded."""
        if self.task is not None and not self._recording and not self.task.done():
            self._aborted = reason
            self.task.cancel()

    def client_left(self) -> None:
        """Nobody waits for the answer any more."""
        self.abort("the client left")

    async def next(self) -> Completed:
        """What the call produces next, the last one a Completion; raises what it failed with."""
        item = await self._items.get()
        if isinstance(item, AnyAgentError):
            raise item
        return item

    async def run(self, completer: Completer, sessions: Sessions, *, stream: bool) -> None:
        session = self.session
        session_id = session.id if session is not None else ""
        try:
            async for item in completer.run(self.prepared, session_id=session_id, stream=stream):
                if isinstance(item, Completion):
                    await self._record(item, sessions)
                else:
                    self._timer.tokens()
                self._items.put_nowait(item)
        except asyncio.CancelledError:
            if self._aborted is None:
                raise
        except AnyAgentError as error:
            self._timer.ended("failed")
            self._items.put_nowait(error)
        except Exception:
            self._timer.ended("failed")
            log.exception("a model call failed")
            self._items.put_nowait(AnyAgentError("the call failed inside the service; see its log"))

    async def _record(self, completion: Completion, sessions: Sessions) -> None:
        """Make the answer durable, if it is a session's."""
        session = self.session
        if session is None:
            self._timer.completed(completion, earlier=None)
            return
        self._recording = True
        await sessions.record(session, completion.interaction, completion.key)
        self.completion = completion
        self._timer.completed(completion, earlier=len(session.tree) - 1)

    def ended(self) -> None:
        """Its task is over. One that was cancelled, perhaps before it began, has said nothing."""
        self._timer.ended("aborted")
        self._items.put_nowait(SessionClosed(self._aborted or "the service is stopping"))


class Calls:
    """Starts calls, bounds their number, and keeps them findable by their session."""

    def __init__(self, completer: Completer, sessions: Sessions, *, limit: int) -> None:
        self._completer = completer
        self._sessions = sessions
        self._limit = limit
        self._running: set[Call] = set()
        self.draining = False
        """Those under way end, and none begins."""
        self.stats = CallStats()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, prepared: Prepared, session: Session | None, *, stream: bool) -> Call:
        """Begin a call; SessionClosed, TooManyRequests or Draining."""
        if self.draining:
            raise draining()
        if session is not None:
            session.require_open()
        if len(self._running) >= self._limit:
            raise TooManyRequests(
                f"{self._limit} model calls are under way; try again",
                code="too_many_calls",
                retry_after=1,
            )
        mode = session.row.mode if session is not None else None
        if session is not None:
            prepared = self._seeded(prepared, session)
        call = Call(prepared, session, self.stats.begin(prepared, mode))
        self._running.add(call)
        if session is not None:
            session.calls.add(call)
        run = call.run(self._completer, self._sessions, stream=stream)
        call.task = asyncio.create_task(run)
        call.task.add_done_callback(lambda _: self._ended(call))
        return call

    def _seeded(self, prepared: Prepared, session: Session) -> Prepared:
        """With the run's own seed for this call, if it has one."""
        seed = self._sessions.names.sampling_seed(session.id, session.next_number)
        return replace(prepared, gconfig=prepared.gconfig.new(seed=seed))

    def _ended(self, call: Call) -> None:
        self._running.discard(call)
        call.ended()

    async def release(self, call: Call) -> None:
        """The caller is done with a call. An answer that reached nobody is never trained on.

        Until here the call stays with its session, so that a finalize knows of it.
        """
        if not call.delivered:
            call.client_left()
            if call.task is not None:
                await asyncio.wait([call.task])
        session = call.session
        if session is None:
            return
        try:
            if call.completion is not None and not call.delivered:
                await self._sessions.mark_undelivered(session, call.completion.interaction)
        except AnyAgentError as error:
            log.error("could not mark %s undelivered: %s", call.prepared.id, error.message)
        finally:
            session.calls.discard(call)

    async def close(self) -> None:
        """Abort every call."""
        for call in tuple(self._running):
            call.abort("the service is stopping")
        tasks = [call.task for call in self._running if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=10)
