"""A rank's model calls: begun, bounded in number, and ended when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from any_agent.completions import ChatCall, Completer, Head, Prepared
from any_agent.errors import AnyAgentError
from any_agent.types import Interaction
from proxy_ext.calls.call import Call, Listener, calls_of
from proxy_ext.calls.concurrency_limit import CallSlot, ConcurrencyLimit
from proxy_ext.calls.stats import CallStats, CallTimer
from proxy_ext.journal import RequestMark
from proxy_ext.sessions.delivery import UNMARKED
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.web.drain import draining
from proxy_ext.web.quotas import TenantQuotas

log = logging.getLogger(__name__)

_MAX_VACANT = 4096
"""Calls without a client that are kept for a retry."""


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
        """``retry_grace``: seconds for which a call without a client waits for a marked retry."""
        self._completer = completer
        self._sessions = sessions
        self._quotas = quotas
        self.places = ConcurrencyLimit(limit)
        self._retry_grace = retry_grace
        self._running: set[Call] = set()
        self._waiting: set[asyncio.Task[None]] = set()
        self.draining = False
        """Those under way end, and none begins."""
        self.stats = CallStats()
        self.turns = LoopTurns()
        """In which prompts are rendered."""

    def __len__(self) -> int:
        return len(self._running)

    def enter(self) -> CallSlot:
        """A place for a request that asks for a call, before it costs anything; TooManyRequests or
        Draining if there is none."""
        if self.draining:
            raise draining()
        return self.places.enter()

    def start(
        self,
        prepared: Prepared,
        session: RecordedSession | None,
        *,
        stream: bool,
        place: CallSlot,
        tenant: str | None = None,
        mark: RequestMark | None = None,
    ) -> Listener:
        """Begin a call, which holds the place until its task is over.

        SessionClosed, VersionGone or Draining; TooManyRequests if there is no room for all of its
        choices.
        """
        if self.draining:
            raise draining()
        if session is not None:
            session.require_open()
            session.require_version(self._completer.engine.version)
        place.widen(len(prepared.choices))
        mode = session.row.mode if session is not None else None
        prepared = self._seeded(prepared, session)
        timer = self.stats.begin(prepared, mode)
        call = Call(Head.of(prepared), session, mark, stream=stream, on_left=self._left)
        self._running.add(call)
        if session is not None:
            session.calls.add(call)
            session.touch()
        call.task = asyncio.create_task(call.run(prepared, self._completer, self._sessions, timer))
        place.hold()

        def ended(_: asyncio.Task[None]) -> None:
            self._ended(call, timer)
            self._quotas.tokens(tenant, call.cost)
            place.leave()

        call.task.add_done_callback(ended)
        return call.listen()

    def recorded(
        self,
        completion_id: str,
        choices: Sequence[Interaction],
        session: RecordedSession,
        mark: RequestMark,
        again: ChatCall,
    ) -> Listener:
        """Take up a call of an earlier process, whose answer may have reached nobody."""
        tree, first = session.tree, choices[0]
        prompt_tokens = sum(len(tree.prompt_ids(i.id)) for i in choices[:: again.n])
        answers = [self._completer.said_again(again, tree, i.id) for i in choices]
        head = Head(completion_id, first.created_at, first.gconfig, prompt_tokens, len(choices))
        call = Call(
            head,
            session,
            mark,
            stream=again.stream,
            on_left=self._left,
            recorded=dict(enumerate(choices)),
            answers=dict(enumerate(answers)),
        )
        session.calls.add(call)
        return call.listen()

    def _seeded(self, prepared: Prepared, session: RecordedSession | None) -> Prepared:
        """With a seed for each choice, if the run has seeds: no two are the same."""
        if session is None:
            return prepared
        seed_of, number = self._sessions.names.sampling_seed, len(session.tree)
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
        return replace(prepared, choices=tuple(choices), gconfig=choices[0].gconfig)

    def _ended(self, call: Call, timer: CallTimer) -> None:
        self._running.discard(call)
        timer.ended("aborted")
        call.ended()
        if call.failed and call.vacant:
            # A client that is there releases it.
            call.closed = True
            if call.recorded:
                self._later(self._let_go(call))
            else:
                call.close()

    def _left(self, call: Call) -> None:
        """End the call, or let it wait for a retry."""
        if call.mark is None or call.failed or len(self._waiting) >= _MAX_VACANT:
            call.closed = True
            call.abort("the client left")
            return
        call.expiry = self._later(self._expire(call))

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return task

    async def _expire(self, call: Call) -> None:
        await asyncio.sleep(self._retry_grace)
        # Nobody can take it up any more, and cancel this.
        call.closed = True
        await self._let_go(call)

    async def release(self, listener: Listener) -> None:
        """The caller is done with a call. A choice that reached nobody is never trained on.

        Until somebody has it the call stays with its session, so that a finalize knows of it.
        """
        try:
            await self._release(listener)
        finally:
            if listener.place is not None:
                listener.place.leave()

    async def _release(self, listener: Listener) -> None:
        call = listener.call
        if listener.delivered:
            self._note_heard(call)
            call.close()
        elif call.failed:
            await self._let_go(call)
        else:
            listener.leave()
            if call.abandoned:
                await self._let_go(call)

    async def _let_go(self, call: Call) -> None:
        """End a call that no client waits for any more."""
        call.abort("the client left")
        if call.task is not None:
            await asyncio.wait([call.task])
        session = call.session
        try:
            self._note_heard(call)
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
            # The session's end marks it, unless a retry takes it up.
            session.unconfirmed[interaction.id] = call.mark or UNMARKED

    def _note_heard(self, call: Call) -> None:
        for index in sorted(call.heard & call.recorded.keys()):
            self._sessions.deliveries.delivered(call.recorded[index].id)

    async def close(self) -> None:
        """Abort every call."""
        for waiting in tuple(self._waiting):
            waiting.cancel()
        for call in tuple(self._running):
            call.abort("the service is stopping")
        tasks = [call.task for call in self._running if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=10)


class LoopTurns:
    """Lets one go on in each round of the event loop, so that others' events go between.

    A hundred calls that arrive together would otherwise stop every stream until the prompts of
    all of them are rendered.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def next(self) -> None:
        """Return when this round is the caller's: in the order of asking."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        self._taken = True
        loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            # Not of one that was cancelled meanwhile.
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)
                return
        self._taken = False
