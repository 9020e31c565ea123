"""A model call: it runs in a task of its own, is recorded, and is heard by one client at a time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from any_agent.chat import MessageDelta
from any_agent.completions import VERSION_GONE, Completer, Completion, Delta, Prepared
from any_agent.errors import AnyAgentError, InvalidRequest, SessionClosed, VersionGone
from any_agent.types import GenerationHyperparameters, Interaction
from proxy_ext.calls.inflight import Place
from proxy_ext.calls.stats import CallTimer
from proxy_ext.journal import RequestMark
from proxy_ext.sessions.live import Sessions
from proxy_ext.sessions.session import Session

log = logging.getLogger(__name__)

Item: TypeAlias = Delta | Interaction
"""What a call produces: deltas when it streams, and last the interaction, which is durable then."""
_number = itertools.count()


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of an answer before its first token."""

    id: str
    created_at: float
    gconfig: GenerationHyperparameters
    prompt_tokens: int

    @classmethod
    def of(cls, prepared: Prepared) -> Head:
        p = prepared
        return cls(p.id, p.created_at, p.gconfig, len(p.prompt_ids))


class Listener:
    """One client of a call: it hears everything from the beginning, and may leave."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.place: Place | None = None
        """Where this client waits; `Calls.release` leaves it."""
        self.delivered = False
        """Whether the client was there when the event that ends the answer was sent."""
        self.gone = False
        self._items: asyncio.Queue[Item | AnyAgentError] = asyncio.Queue()

    def put(self, item: Item | AnyAgentError) -> None:
        self._items.put_nowait(item)

    async def next(self) -> Item:
        """What the call produces next, the last one an Interaction; raises what it failed with."""
        item = await self._items.get()
        if isinstance(item, AnyAgentError):
            raise item
        return item

    def leave(self) -> None:
        """Nobody waits here for the answer any more."""
        if not self.gone and not self.delivered:
            self.gone = True
            self.put(InvalidRequest("the client left"))
            self.call.left(self)


class Call:
    """One model call.

    With a ``mark`` its client's SDK marks its retries: when the client leaves, the call is vacant,
    and goes on for a while so that a retry can take it up.
    """

    def __init__(
        self,
        head: Head,
        session: Session | None,
        mark: RequestMark | None,
        *,
        stream: bool,
        on_left: Callable[[Call], None],
        interaction: Interaction | None = None,
        answer: Interaction | None = None,
    ) -> None:
        self.head = head
        self.session = session
        self.mark = mark
        self.number = next(_number)
        """In the order of their beginning."""
        self.task: asyncio.Task[None] | None = None
        self.interaction = interaction
        """As it is recorded, durably; None while the call is under way, for good if it fails."""
        self._answer = answer or interaction
        """With its texts, which may not be recorded."""
        self.closed = False
        """No retry can take it up any more."""
        self.expiry: asyncio.Task[None] | None = None
        self.watchers: set[asyncio.Event] = set()
        """Set when its client has left, or has the answer."""
        self.cost = head.prompt_tokens
        """Tokens that its tenant is charged: the prompt's, and those sampled so far."""
        self._stream = stream
        self._listener: Listener | None = None
        self._on_left = on_left
        self._so_far = _SoFar() if mark is not None and stream else None
        self._recording = False
        self._aborted: str | None = None

    @property
    def pinned(self) -> int | None:
        """The weight version that all of its tokens must have."""
        return self.session.row.pinned_version if self.session is not None else None

    @property
    def vacant(self) -> bool:
        """Whether a retry can take it up."""
        return self._listener is None and not self.closed

    @property
    def delivered(self) -> bool:
        return self._listener is not None and self._listener.delivered

    @property
    def abandoned(self) -> bool:
        """Whether its client left, and no other one can come."""
        return self._listener is None and self.closed

    @property
    def failed(self) -> bool:
        """Whether it is over without an answer."""
        return self.task is not None and self.task.done() and self.interaction is None

    def listen(self) -> Listener:
        """Its next client; of a call under way what it produced so far comes as one delta."""
        if self.expiry is not None:
            self.expiry.cancel()
        listener = self._listener = Listener(self)
        if self._answer is not None:
            if self._stream:
                listener.put(_whole(self._answer))
            listener.put(self._answer)
        elif self._so_far is not None and not self._so_far.empty:
            listener.put(self._so_far.delta())
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
        """Cancel the generation; without effect once the answer is being recorded."""
        if self.task is not None and not self._recording and not self.task.done():
            self._aborted = reason
            self.task.cancel()

    async def run(
        self, prepared: Prepared, completer: Completer, sessions: Sessions, timer: CallTimer
    ) -> None:
        session_id = self.session.id if self.session is not None else ""
        stream, pinned = self._stream, self.pinned
        try:
            async for item in completer.run(
                prepared, session_id=session_id, stream=stream, pinned=pinned
            ):
                if isinstance(item, Completion):
                    await self._record(item, sessions, timer)
                    self._produced(item.interaction)
                else:
                    timer.tokens()
                    self.cost += len(item.output_ids)
                    self._produced(item)
        except asyncio.CancelledError:
            if self._aborted is None:
                raise
        except AnyAgentError as error:
            timer.ended("failed")
            self.cost = 0
            self._say(error)
        except Exception:
            timer.ended("failed")
            self.cost = 0
            log.exception("a model call failed")
            self._say(AnyAgentError("the call failed inside the service; see its log"))

    async def _record(self, completion: Completion, sessions: Sessions, timer: CallTimer) -> None:
        """Make the answer durable, if it is a session's."""
        self.cost = self.head.prompt_tokens + len(completion.interaction.output_ids)
        session = self.session
        if session is None:
            timer.completed(completion, earlier=None)
            return
        self._recording = True
        if completion.interaction.untrainable_reason == VERSION_GONE:
            # For the record: it is no answer, neither to this request nor to a retry of it.
            await sessions.record(session, completion.interaction, completion.key, None)
            last = int(completion.interaction.output_versions[-1])
            raise VersionGone.of(self.pinned, last)
        self.interaction = await sessions.record(
            session, completion.interaction, completion.key, self.mark
        )
        self._answer = completion.interaction
        timer.completed(completion, earlier=len(session.tree) - 1)

    def _produced(self, item: Item) -> None:
        if isinstance(item, Interaction):
            self._so_far = None
        elif self._so_far is not None:
            self._so_far.add(item)
        self._say(item)

    def _say(self, item: Item | AnyAgentError) -> None:
        if self._listener is not None:
            self._listener.put(item)

    def ended(self) -> None:
        """Its task is over. One that was cancelled, perhaps before it began, has said nothing."""
        self._say(SessionClosed(self._aborted or "the service is stopping"))
        if self.failed and self._listener is None:
            self.close()


class _SoFar:
    """What a stream has produced, for a client that comes later."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[dict[str, object]] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []

    @property
    def empty(self) -> bool:
        return not self._ids

    def add(self, item: Delta) -> None:
        message = item.message
        if message.content:
            self._content.append(message.content)
        if message.reasoning_content:
            self._reasoning.append(message.reasoning_content)
        self._tool_calls += message.tool_calls or ()
        self._ids += item.output_ids
        self._logprobs += item.logprobs

    def delta(self) -> Delta:
        message = MessageDelta(
            content="".join(self._content) or None,
            reasoning_content="".join(self._reasoning) or None,
            tool_calls=list(self._tool_calls) or None,
        )
        return Delta(message, list(self._ids), list(self._logprobs))


def _whole(interaction: Interaction) -> Delta:
    """All of a recorded answer."""
    message = interaction.output_message
    calls = [{"index": k, **c} for k, c in enumerate(message.get("tool_calls") or ())]
    return Delta(
        MessageDelta(message.get("content"), message.get("reasoning_content"), calls or None),
        interaction.output_ids.tolist(),
        interaction.output_logprobs.tolist(),
    )
