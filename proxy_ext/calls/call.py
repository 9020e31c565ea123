"""One model call: it runs in a task of its own, records each choice, and serves one client at a
time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from any_agent.completions.call_types import Completion, Delta, Head, Prepared
from any_agent.completions.completer import VERSION_GONE, Completer
from any_agent.completions.params.call import ChatCall
from any_agent.completions.prepare import with_request_parameter
from any_agent.completions.untrainable import GUARDRAIL_VETO
from any_agent.errors import AnyAgentError, InvalidRequest, SessionClosed, VersionGone
from any_agent.types import Interaction
from proxy_ext.calls.concurrency_limit import CallSlot
from proxy_ext.calls.stats import CallTimer
from proxy_ext.calls.stream_buffer import StreamBuffer, recorded_deltas
from proxy_ext.journal import RequestMark
from proxy_ext.journal.base import CountUsage
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore

log = logging.getLogger(__name__)

_number = itertools.count()
_MAX_LOGGED = 300  # characters of an error


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of one choice, whose interaction is durable by then."""

    index: int
    interaction: Interaction


Item: TypeAlias = Delta | CallEnd
"""An output of a call: deltas of a choice when it streams, and last the choice's end."""


class Listener:
    """One client of a call: it receives everything from the beginning, and may disconnect."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.slot: CallSlot | None = None
        """The slot of the client's request; `CallManager.release` releases it."""
        self.gone = False
        self._delivered: set[int] = set()
        self._items: deque[Item | AnyAgentError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, *items: Item | AnyAgentError) -> None:
        self._items.extend(items)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> Item:
        """Return the call's next output, last a CallEnd for each choice; raise its failure."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, AnyAgentError):
            raise item
        return item

    @property
    def ready(self) -> bool:
        """Return True if `next` would return an output at once."""
        return bool(self._items) and not isinstance(self._items[0], AnyAgentError)

    def mark_sent(self, index: int) -> None:
        """Record that the event which ends this choice was sent to a connected client."""
        self._delivered.add(index)
        self.call.sent.add(index)

    @property
    def delivered(self) -> bool:
        """Return True if the end of every choice was sent to the connected client."""
        return len(self._delivered) == self.call.head.choices

    def disconnect(self) -> None:
        """End the client's wait; without effect once everything was delivered."""
        if not self.gone and not self.delivered:
            self.gone = True
            self.put(InvalidRequest("the client left"))
            self.call.on_listener_left(self)


class Call:
    """One model call of one or several choices: answered when all are recorded, failed when one
    fails.

    A ``mark`` means that the client's SDK marks its retries: when the client leaves, the call is
    vacant and goes on for a while, so that a retry can join it.
    """

    def __init__(
        self,
        head: Head,
        session: RecordedSession | None,
        mark: RequestMark | None,
        *,
        stream: bool,
        on_client_left: Callable[[Call], None],
        tenant: str | None = None,
        recorded: Mapping[int, Interaction] | None = None,
        answers: Mapping[int, Interaction] | None = None,
    ) -> None:
        """``recorded`` and ``answers``: all choices of a call that an earlier process recorded."""
        self.head = head
        self.session = session
        self.mark = mark
        self.number = next(_number)
        """Grows in the order in which calls start."""
        self.task: asyncio.Task[None] | None = None
        self.recorded: dict[int, Interaction] = dict(recorded or {})
        """The durable interactions, by choice."""
        self._answers: dict[int, Interaction] = dict(answers or {})
        """The same with their texts, which may not be recorded."""
        self.sent: set[int] = set()
        """Choices whose end was sent to a connected client."""
        self.closed = False
        """No retry can join the call any more."""
        self.expiry: asyncio.Task[None] | None = None
        self.watchers: set[asyncio.Event] = set()
        """Set when the client has left, or has the answer."""
        self._sampled = [0] * head.choices
        self._counted = False
        self._failure: AnyAgentError | None = None
        self._stream = stream
        self._tenant = tenant
        self._listener: Listener | None = None
        self._on_client_left = on_client_left
        buffered = mark is not None and stream
        self._buffers = {k: StreamBuffer(k) for k in range(head.choices)} if buffered else {}
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        """One per choice, if there are several; a single one is sampled in the call's own task."""
        self._recording: set[asyncio.Task[None] | None] = set()
        self._aborted: str | None = None

    @property
    def cost(self) -> int:
        """Tokens that its tenant is charged: the prompt's and those sampled so far."""
        return 0 if self._failure is not None else self.head.prompt_tokens + sum(self._sampled)

    @property
    def pinned(self) -> int | None:
        """The weight version that all of its tokens must have; None: any."""
        return self.session.row.pinned_version if self.session is not None else None

    @property
    def vacant(self) -> bool:
        """Return True if a retry can join the call."""
        return self._listener is None and not self.closed

    @property
    def answered(self) -> bool:
        """Return True if all of its choices are recorded."""
        return len(self.recorded) == self.head.choices

    @property
    def undelivered(self) -> list[Interaction]:
        """Recorded choices whose end was not sent to a connected client."""
        return [i for k, i in self.recorded.items() if k not in self.sent]

    @property
    def abandoned(self) -> bool:
        """Return True if the client left and no other one can come."""
        return self._listener is None and self.closed

    @property
    def failed(self) -> bool:
        """Return True if there will be no answer; one of its choices may still be recorded."""
        over = self.task is not None and self.task.done() and not self.answered
        return over or self._failure is not None

    def listen(self) -> Listener:
        """Return the call's next client, with everything that the call produced so far."""
        if self.expiry is not None:
            self.expiry.cancel()
        listener = self._listener = Listener(self)
        for index in range(self.head.choices):
            answer = self._answers.get(index)
            if answer is not None:
                if self._stream:
                    listener.put(*recorded_deltas(answer, index))
                listener.put(CallEnd(index, answer))
            elif index in self._buffers:
                listener.put(*self._buffers[index].deltas())
        return listener

    def on_listener_left(self, listener: Listener) -> None:
        """Make the call vacant, if this was its client."""
        if self._listener is listener:
            self._listener = None
            self._on_client_left(self)
            self.notify_watchers()

    def close(self) -> None:
        """Take the call from its session: it was answered, or no retry came in time."""
        self.closed = True
        self.notify_watchers()
        if self.session is not None:
            self.session.calls.discard(self)
            self.session.touch()

    def notify_watchers(self) -> None:
        for watcher in self.watchers:
            watcher.set()

    def abort(self, reason: str) -> None:
        """Cancel the generation; without effect on a choice once it is being recorded."""
        if self.task is None or self.task.done():
            return
        current = asyncio.current_task()
        for task in self._tasks or (self.task,):
            if task not in self._recording and task is not current and not task.done():
                self._aborted = self._aborted or reason
                task.cancel()

    async def run(
        self, prepared: Prepared, completer: Completer, sessions: SessionStore, timer: CallTimer
    ) -> None:
        """Sample and record all choices, and send them to the client."""
        self._completer, self._sessions, self._timer = completer, sessions, timer
        if len(prepared.choices) == 1:
            await self._sample(prepared, 0)
        else:
            async with asyncio.TaskGroup() as group:
                samples = (self._sample(prepared, k) for k in range(len(prepared.choices)))
                self._tasks = tuple(map(group.create_task, samples))
        if self._failure is None and len(self._answers) == self.head.choices:
            timer.completed()

    async def _sample(self, prepared: Prepared, index: int) -> None:
        # An argument, not an attribute: a call that waits for its client lets go of its messages.
        session_id = self.session.id if self.session is not None else ""
        stream, pinned = self._stream, self.pinned
        buffer = self._buffers.get(index)
        try:
            async for item in self._completer.run(
                prepared, index, session_id=session_id, stream=stream, pinned=pinned
            ):
                if isinstance(item, Delta):
                    self._timer.tokens_arrived()
                    self._sampled[index] += len(item.output_ids)
                    if buffer is not None:
                        buffer.add(item)
                    self._send(item)
                else:
                    await self._mark_refused(item.interaction, prepared.call)
                    await self._record(item)
                    self._send(CallEnd(index, item.interaction))
        except asyncio.CancelledError:
            if self._aborted is None:
                raise
        except AnyAgentError as error:
            self._fail(with_request_parameter(error, prepared.call))
        except Exception:
            log.exception("a model call failed")
            self._fail(AnyAgentError("the call failed inside the service; see its log"))

    async def _mark_refused(self, interaction: Interaction, call: ChatCall) -> None:
        """Keep an answer out of training, or its session, that a guardrail refuses."""
        refuses = self._sessions.refuses
        if refuses is None:
            return
        trainable = interaction.untrainable_reason is None
        reason = await refuses(call, interaction.output_message, trainable=trainable)
        interaction.untrainable_reason = reason or interaction.untrainable_reason
        if reason == GUARDRAIL_VETO:
            # An answer that nobody receives is marked as such instead, and vetoes all the same.
            interaction.request = {**interaction.request, "vetoed": True}

    def _fail(self, error: AnyAgentError) -> None:
        """Fail the whole call because one choice failed."""
        self._timer.ended("failed")
        if self._failure is None:
            self._failure = error
            if error.status >= 500:
                log.warning(
                    "the model call %s failed with %d %s: %s",
                    *(self.head.id, error.status, error.code, error.message[:_MAX_LOGGED]),
                )
            self._send(error)
        if self._tasks:
            self.abort("another choice of the call failed")

    def _usage_of(self, interaction: Interaction) -> tuple[CountUsage, ...]:
        """Return the statement that counts a choice; the first one that is recorded counts the
        prompt and the call."""
        prompt = None if self._counted else self.head.prompt_tokens
        self._counted = True
        return self._sessions.usage_of(interaction, prompt=prompt)

    async def _record(self, completion: Completion) -> None:
        """Make a choice durable, if the call belongs to a session."""
        index, interaction = completion.choice.index, completion.interaction
        self._sampled[index] = len(interaction.output_ids)
        session = self.session
        if session is None:
            if usage := self._usage_of(interaction):
                self._recording.add(asyncio.current_task())
                await self._sessions.deliveries.commit(*usage)
            self._timer.recorded(completion, earlier=None)
            for listener in self._sessions.listeners:
                listener.on_call(None, interaction, self._tenant)
        else:
            record = self._sessions.record
            self._recording.add(asyncio.current_task())
            if interaction.untrainable_reason == VERSION_GONE:
                # Recorded only: it answers neither this request nor a retry of it.
                await record(session, interaction, completion.key, None)
                raise VersionGone.of(self.pinned, int(interaction.output_versions[-1]))
            usage = self._usage_of(interaction)
            durable = await record(session, interaction, completion.key, self.mark, *usage)
            self.recorded[index] = durable
            self._timer.recorded(completion, earlier=len(session.tree) - len(self.recorded))
        self._answers[index] = interaction
        if index in self._buffers:
            self._buffers[index].clear()

    def _send(self, item: Item | AnyAgentError) -> None:
        if self._listener is not None:
            self._listener.put(item)

    def on_task_done(self) -> None:
        """Send an error last: a task that was cancelled, perhaps before it began, has sent none."""
        self._send(SessionClosed(self._aborted or "the service is stopping"))


def calls_of(session: RecordedSession) -> list[Call]:
    """Return a session's calls of the policy that are under way or wait for a retry."""
    return [call for call in session.calls if isinstance(call, Call)]
