"""One rank's model calls: started, bounded in number, and ended when no client waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from any_agent.completions.call_types import Head, Prepared
from any_agent.completions.completer import Completer
from any_agent.completions.params.call import ChatCall
from any_agent.errors import AnyAgentError
from any_agent.types import Interaction
from proxy_ext.calls.call import Call, Listener, calls_of
from proxy_ext.calls.concurrency_limit import ANY_OWNER, CallOwner, CallSlot, ConcurrencyLimit
from proxy_ext.calls.stats import CallStats, CallTimer
from proxy_ext.journal import RequestMark
from proxy_ext.sessions.delivery import UNMARKED
from proxy_ext.sessions.session import RecordedSession, abort_calls
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.web.drain import draining
from proxy_ext.web.quotas import TenantQuotas

log = logging.getLogger(__name__)

_MAX_VACANT = 4096  # calls without a client that wait for a retry


class CallManager:
    """Starts calls, bounds their number, and keeps them findable by their session."""

    def __init__(
        self,
        completer: Completer,
        sessions: SessionStore,
        *,
        limit: int,
        retry_grace: float,
        quotas: TenantQuotas,
    ) -> None:
        """``retry_grace``: seconds that a call without a client waits for a marked retry."""
        self._completer = completer
        self._sessions = sessions
        self._quotas = quotas
        self.concurrency = ConcurrencyLimit(limit)
        self._retry_grace = retry_grace
        self._running: set[Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.draining = False
        """Calls under way go on, and none begins."""
        self.stats = CallStats()
        self.render_turns = LoopTurns()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def full(self) -> bool:
        """True if every call is refused now."""
        return self.draining or self.concurrency.in_use >= self.concurrency.limit

    def require_slot(self, owner: CallOwner) -> None:
        """Refuse a call before its body is read, if no slot is free; TooManyRequests or
        Draining."""
        if self.draining:
            raise draining()
        self.concurrency.require_free(owner)

    def acquire_slot(self, owner: CallOwner = ANY_OWNER) -> CallSlot:
        """Return a slot for a call whose body is there; TooManyRequests or Draining."""
        if self.draining:
            raise draining()
        return self.concurrency.acquire(owner)

    def start(
        self,
        prepared: Prepared,
        session: RecordedSession | None,
        *,
        stream: bool,
        slot: CallSlot,
        tenant: str | None = None,
        mark: RequestMark | None = None,
    ) -> Listener:
        """Start a call, which shares the slot until its task is over.

        SessionClosed, VersionGone or Draining; TooManyRequests if there is no room for all of its
        choices.
        """
        if self.draining:
            raise draining()
        if session is not None:
            session.require_open()
            session.require_version(self._completer.engine.version)
        slot.grow(len(prepared.choices))
        mode = session.row.mode if session is not None else None
        prepared = self._with_seeds(prepared, session)
        timer = CallTimer(self.stats, prepared, mode)
        call = Call(
            Head.of(prepared),
            session,
            mark,
            stream=stream,
            tenant=tenant,
            on_client_left=self._on_client_left,
        )
        self._running.add(call)
        if session is not None:
            session.calls.add(call)
            session.touch()
        call.task = asyncio.create_task(call.run(prepared, self._completer, self._sessions, timer))
        slot.share()

        def on_done(_: asyncio.Task[None]) -> None:
            self._on_task_done(call, timer)
            self._quotas.charge_tokens(tenant, call.cost)
            slot.release()

        call.task.add_done_callback(on_done)
        return call.listen()

    def resume_recorded(
        self,
        completion_id: str,
        choices: Sequence[Interaction],
        session: RecordedSession,
        mark: RequestMark,
        again: ChatCall,
    ) -> Listener:
        """Answer a retry from an earlier process's record, which may have reached no client."""
        tree, first = session.tree, choices[0]
        prompt_tokens = sum(len(tree.prompt_ids(i.id)) for i in choices[:: again.n])
        answers = [self._completer.recorded_answer(again, tree, i.id) for i in choices]
        head = Head(completion_id, first.created_at, first.gconfig, prompt_tokens, len(choices))
        call = Call(
            head,
            session,
            mark,
            stream=again.stream,
            on_client_left=self._on_client_left,
            recorded=dict(enumerate(choices)),
            answers=dict(enumerate(answers)),
        )
        session.calls.add(call)
        return call.listen()

    def _with_seeds(self, prepared: Prepared, session: RecordedSession | None) -> Prepared:
        """Give each choice a seed of its own, if the run is deterministic."""
        if session is None:
            return prepared
        seed_of, number = self._sessions.ids.sampling_seed, len(session.tree)
        seed = seed_of(session.id, number)
        if seed is None:
            return prepared
        taken = {i.gconfig.seed for i in session.tree}
        taken |= {seed for call in calls_of(session) for seed in call.head.seeds}
        choices = []
        for choice in prepared.choices:
            while seed in taken:
                number += 1
                seed = seed_of(session.id, number)
            taken.add(seed)
            choices.append(replace(choice, gconfig=choice.gconfig.new(seed=seed)))
        return replace(prepared, choices=tuple(choices))

    def _on_task_done(self, call: Call, timer: CallTimer) -> None:
        self._running.discard(call)
        timer.ended("aborted")
        call.on_task_done()
        if call.failed and call.vacant:
            # A client that is connected releases the call itself.
            call.closed = True
            if call.recorded:
                self._spawn(self._finish_undelivered(call))
            else:
                call.close()

    def _on_client_left(self, call: Call) -> None:
        """End the call, or let it wait for a retry."""
        if call.mark is None or call.failed or len(self._tasks) >= _MAX_VACANT:
            call.closed = True
            call.abort("the client left")
            return
        call.expiry = self._spawn(self._expire(call))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _expire(self, call: Call) -> None:
        await asyncio.sleep(self._retry_grace)
        # From here on no retry can join the call and cancel this task.
        call.closed = True
        await self._finish_undelivered(call)

    async def release(self, listener: Listener) -> None:
        """End a client's part in a call. A choice that reached no client is never trained on.

        An undelivered call stays with its session, so that a finalize knows of it.
        """
        call = listener.call
        try:
            if listener.delivered:
                self._record_delivery(call)
                call.close()
            elif call.failed:
                await self._finish_undelivered(call)
            else:
                listener.disconnect()
                if call.abandoned:
                    await self._finish_undelivered(call)
        finally:
            if listener.slot is not None:
                listener.slot.release()

    async def _finish_undelivered(self, call: Call) -> None:
        """End a call that no client waits for any more."""
        call.abort("the client left")
        if call.task is not None:
            await asyncio.wait([call.task])
        session = call.session
        try:
            self._record_delivery(call)
            if session is not None:
                for interaction in call.undelivered:
                    await self._mark_undelivered(call, session, interaction)
        finally:
            call.close()

    async def _mark_undelivered(
        self, call: Call, session: RecordedSession, interaction: Interaction
    ) -> None:
        try:
            await self._sessions.mark_undelivered(session, interaction)
        except AnyAgentError as error:
            log.error("could not mark %s undelivered yet: %s", interaction.id, error.message)
            # The session's end marks it, unless a retry fetches it first.
            session.unconfirmed[interaction.id] = call.mark or UNMARKED

    def _record_delivery(self, call: Call) -> None:
        for index in sorted(call.sent & call.recorded.keys()):
            self._sessions.deliveries.mark_delivered(call.recorded[index].id)

    async def close(self) -> None:
        """Abort every call."""
        for task in tuple(self._tasks):
            task.cancel()
        await abort_calls(self._running, "the service is stopping", seconds=10)


class LoopTurns:
    """A queue that lets its tasks go on one after the other, with other events in between.

    A hundred calls that arrive together would otherwise stop every stream until the prompts of
    all of them are rendered.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Wait until it is the caller's turn, in the order of the calls."""
        await self._lock.acquire()
        # In a later round of the event loop.
        asyncio.get_running_loop().call_soon(self._lock.release)
