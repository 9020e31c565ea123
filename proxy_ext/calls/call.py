"""A model call: it runs in a task of its own, each of its choices is recorded, and it is heard by
one client at a time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from any_agent.completions import (
    VERSION_GONE,
    Completer,
    Completion,
    Delta,
    Head,
    Prepared,
)
from any_agent.completions.refused import with_request_parameter
from any_agent.errors import AnyAgentError, InvalidRequest, SessionClosed, VersionGone
from any_agent.types import Interaction
from proxy_ext.calls.concurrency_limit import CallSlot
from proxy_ext.calls.stats import CallTimer
from proxy_ext.calls.stream_buffer import StreamBuffer, whole
from proxy_ext.journal import RequestMark
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore

log = logging.getLogger(__name__)

_number = itertools.count()
_LOGGED = 300
"""Characters of an error that are logged."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of one choice; its interaction is durable then."""

    index: int
    interaction: Interaction


Item: TypeAlias = Delta | CallEnd
"""What a call produces: of each choice deltas when it streams, and last its end."""


class Listener:
    """One client of a call: it hears everything from the beginning, and may leave."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.place: CallSlot | None = None
        """Where this client waits; `Calls.release` leaves it."""
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
        """What the call produces next, an Ended last of each choice; raises what it failed with."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, AnyAgentError):
            raise item
        return item

    @property
    def ready(self) -> bool:
        """Whether something more is there that is no failure: `next` returns it at once."""
        return bool(self._items) and not isinstance(self._items[0], AnyAgentError)

    def deliver(self, index: int) -> None:
        """The client was there when the event that ends this choice was sent."""
        self._delivered.add(index)
        self.call.heard.add(index)

    @property
    def delivered(self) -> bool:
        """Whether the client was there for the end of every choice."""
        return len(self._delivered) == self.call.head.choices

    def leave(self) -> None:
        """Nobody waits here for the answer any more."""
        if not self.gone and not self.delivered:
            self.gone = True
            self.put(InvalidRequest("the client left"))
            self.call.left(self)


class Call:
    """One model call, of one or several choices: it is answered when all are recorded, and failed
    when one has.

    With a ``mark`` its client's SDK marks its retries: when the client leaves, the call is vacant,
    and goes on for a while so that a retry can take it up.
    """

    def __init__(
        self,
        head: Head,
        session: RecordedSession | None,
        mark: RequestMark | None,
        *,
        stream: bool,
        on_left: Callable[[Call], None],
        recorded: Mapping[int, Interaction] | None = None,
        answers: Mapping[int, Interaction] | None = None,
    ) -> None:
        """``recorded`` and ``answers``: of an earlier process, all of the choices."""
        self.head = head
        self.session = session
        self.mark = mark
        self.number = next(_number)
        """In the order of their beginning."""
        self.task: asyncio.Task[None] | None = None
        self.recorded: dict[int, Interaction] = dict(recorded or {})
        """By choice, as they are recorded, durably."""
        self._answers: dict[int, Interaction] = dict(answers or {})
        """With their texts, which may not be recorded."""
        self.heard: set[int] = set()
        """Choices whose end was sent to a client that was there."""
        self.closed = False
        """No retry can take it up any more."""
        self.expiry: asyncio.Task[None] | None = None
        self.watchers: set[asyncio.Event] = set()
        """Set when its client has left, or has the answer."""
        self._sampled = [0] * head.choices
        self._failure: AnyAgentError | None = None
        self._stream = stream
        self._listener: Listener | None = None
        self._on_left = on_left
        keeps = mark is not None and stream
        self._so_far = [StreamBuffer(k) for k in range(head.choices)] if keeps else None
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        """Of its choices, if they are several; else it is sampled in the call's own."""
        self._recording: set[asyncio.Task[None] | None] = set()
        self._aborted: str | None = None

    @property
    def cost(self) -> int:
        """Tokens that its tenant is charged: the prompt's, and those sampled so far."""
        return 0 if self._failure is not None else self.head.prompt_tokens + sum(self._sampled)

    @property
    def pinned(self) -> int | None:
        """The weight version that all of its tokens must have."""
        return self.session.row.pinned_version if self.session is not None else None

    @property
    def vacant(self) -> bool:
        """Whether a retry can take it up."""
        return self._listener is None and not self.closed

    @property
    def answered(self) -> bool:
        """Whether all of its choices are recorded."""
        return len(self.recorded) == self.head.choices

    @property
    def undelivered(self) -> list[Interaction]:
        """What is recorded of it and was not sent to its end."""
        return [i for k, i in self.recorded.items() if k not in self.heard]

    @property
    def abandoned(self) -> bool:
        """Whether its client left, and no other one can come."""
        return self._listener is None and self.closed

    @property
    def failed(self) -> bool:
        """Whether there will be no answer; it may be over, or still record one of its choices."""
        over = self.task is not None and self.task.done() and not self.answered
        return over or self._failure is not None

    def listen(self) -> Listener:
        """Its next client; of a call under way what it produced so far comes at once."""
        if self.expiry is not None:
            self.expiry.cancel()
        listener = self._listener = Listener(self)
        for index in range(self.head.choices):
            answer = self._answers.get(index)
            if answer is not None:
                if self._stream:
                    listener.put(*whole(answer, index))
                listener.put(CallEnd(index, answer))
            elif self._so_far is not None and not self._so_far[index].empty:
                listener.put(*self._so_far[index].deltas())
        return listener

    def left(self, listener: Listener) -> None:
        """A client left."""
        if self._listener is listener:
            self._listener = None
            self._on_left(self)
            self.tell_watchers()

    def close(self) -> None:
        """It was answered, or nobody came back for it in time."""
        self.closed = True
        self.tell_watchers()
        if self.session is not None:
            self.session.calls.discard(self)
            self.session.touch()

    def tell_watchers(self) -> None:
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
        if len(prepared.choices) == 1:
            await self._sample(prepared, 0, completer, sessions, timer)
        else:
            self._tasks = tuple(
                asyncio.create_task(self._sample(prepared, index, completer, sessions, timer))
                for index in range(len(prepared.choices))
            )
            try:
                await asyncio.wait(self._tasks)
            finally:
                for task in self._tasks:
                    task.cancel()
        if self._failure is None and len(self._answers) == self.head.choices:
            timer.completed()

    async def _sample(
        self,
        prepared: Prepared,
        index: int,
        completer: Completer,
        sessions: SessionStore,
        timer: CallTimer,
    ) -> None:
        session_id = self.session.id if self.session is not None else ""
        stream, pinned = self._stream, self.pinned
        so_far = self._so_far[index] if self._so_far is not None else None
        try:
            async for item in completer.run(
                prepared, index, session_id=session_id, stream=stream, pinned=pinned
            ):
                if isinstance(item, Delta):
                    timer.tokens()
                    self._sampled[index] += len(item.output_ids)
                    if so_far is not None:
                        so_far.add(item)
                    if self._listener is not None:
                        self._listener.put(item)
                else:
                    await self._record(item, sessions, timer)
                    self._say(CallEnd(index, item.interaction))
        except asyncio.CancelledError:
            if self._aborted is None:
                raise
        except AnyAgentError as error:
            self._fail(with_request_parameter(error, prepared.call), timer)
        except Exception:
            log.exception("a model call failed")
            self._fail(AnyAgentError("the call failed inside the service; see its log"), timer)

    def _fail(self, error: AnyAgentError, timer: CallTimer) -> None:
        """One choice cannot be had, so the others are not either."""
        timer.ended("failed")
        if self._failure is None:
            self._failure = error
            if error.status >= 500:
                log.warning(
                    "the model call %s failed with %d %s: %s",
                    *(self.head.id, error.status, error.code, error.message[:_LOGGED]),
                )
            self._say(error)
        if self._tasks:
            self.abort("another choice of the call failed")

    async def _record(
        self, completion: Completion, sessions: SessionStore, timer: CallTimer
    ) -> None:
        """Make a choice durable, if it is a session's."""
        index, interaction = completion.choice.index, completion.interaction
        self._sampled[index] = len(interaction.output_ids)
        session = self.session
        if session is None:
            timer.recorded(completion, earlier=None)
        else:
            self._recording.add(asyncio.current_task())
            if interaction.untrainable_reason == VERSION_GONE:
                # For the record: it is no answer, neither to this request nor to a retry of it.
                await sessions.record(session, interaction, completion.key, None)
                raise VersionGone.of(self.pinned, int(interaction.output_versions[-1]))
            self.recorded[index] = await sessions.record(
                session, interaction, completion.key, self.mark
            )
            timer.recorded(completion, earlier=len(session.tree) - len(self.recorded))
        self._answers[index] = interaction
        if self._so_far is not None:
            self._so_far[index].clear()

    def _say(self, item: Item | AnyAgentError) -> None:
        if self._listener is not None:
            self._listener.put(item)

    def ended(self) -> None:
        """Its task is over. One that was cancelled, perhaps before it began, has said nothing."""
        self._say(SessionClosed(self._aborted or "the service is stopping"))


def calls_of(session: RecordedSession) -> list[Call]:
    """Return a session's calls of the policy that are under way or wait for a retry."""
    return [call for call in session.calls if isinstance(call, Call)]
