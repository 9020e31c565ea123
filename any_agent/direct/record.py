"""The session of a direct client: its recorded tree, and its calls under way."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from any_agent.chat import ChatFormat
from any_agent.completions.call_types import Completed, Completion, Delta, Prepared, completion_of
from any_agent.completions.completer import Completer
from any_agent.completions.parsed_request import ParseContext
from any_agent.completions.prepare import with_request_parameter
from any_agent.engine import InferenceEngine
from any_agent.engine.base import adapter_names
from any_agent.errors import AnyAgentError, ConfigError, InvalidRequest, NotFound, SessionClosed
from any_agent.record import InteractionTree
from any_agent.types import GenerationHyperparameters, Interaction, SessionMode

log = logging.getLogger(__name__)

_NO_LIMIT = 10**9  # transformers reports more than this where a tokenizer has no longest input


@dataclass(eq=False, repr=False)
class DirectSession:
    """The session of one client."""

    id: str
    engine: InferenceEngine
    chat: ChatFormat
    mode: SessionMode
    sampling: GenerationHyperparameters
    model: str
    context_length: int | None
    keeps_cache: bool

    def __post_init__(self) -> None:
        """Raise ConfigError if the context length is not known."""
        self.tree = InteractionTree()
        self.final_reward: float | None = None
        self.discount = 1.0
        self.closed = False
        self.calls: set[ChoiceTasks] = set()
        self._find_length = _context_length(self.engine, self.chat, self.context_length)
        self._completer: Completer | None = None

    async def completer(self) -> Completer:
        """Return the completer; EngineUnavailable if the engine cannot tell its context length."""
        if self._completer is None:
            length, adapters = await self._find_length(), await adapter_names(self.engine)
            # Several first calls may have come this far.
            self._completer = self._completer or Completer(
                self.engine,
                self.chat,
                context_length=length,
                keeps_cache=self.keeps_cache,
                adapters=adapters,
            )
        return self._completer

    def context(self, completer: Completer) -> ParseContext:
        """Return what parsers of this session's requests get."""
        return ParseContext(
            self.mode,
            self.sampling,
            self.model,
            self.chat.renderer.known_settings,
            chat=self.chat,
            context_length=completer.context_length,
            tree=self.tree,
        )

    def require_open(self) -> None:
        if self.closed:
            raise SessionClosed(
                "this client was closed: its record can be exported; make another client for the "
                "next session"
            )

    def record(self, completion: Completion) -> None:
        """Record a choice; await nothing between this and handing over the answer."""
        self.require_open()
        self.tree.add(completion.interaction, completion.key)

    async def close(self) -> None:
        """End the calls under way without recording them."""
        self.closed = True
        calls = list(self.calls)
        for call in calls:
            call.fail(SessionClosed("the client was closed during the call"))
        await asyncio.gather(*(call.close() for call in calls))

    def find(self, interaction_id: str) -> Interaction:
        """Return the interaction that a reward is for; InvalidRequest or NotFound without one."""
        found = self.tree.get(interaction_id)
        if found is not None:
            return found
        if any(completion_of(one.id) == interaction_id for one in self.tree):
            raise InvalidRequest(
                f"completion {interaction_id} has several choices, each with a reward of its own: "
                f"name one by its index, as {interaction_id}.0",
                param="id",
                code="choice_needed",
            )
        raise NotFound(
            f"nothing is recorded under the id {str(interaction_id)[:80]!r}",
            code="completion_not_found",
        )


def checked_number(name: str, value: Any, low: float, high: float) -> float:
    """Return a number, also one of numpy or torch, as a float; InvalidRequest for any other value,
    and for one outside of these limits."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:
        raise InvalidRequest(
            f"{name} is {str(value)[:80]}: it must be a number between {low:g} and {high:g}",
            param=name,
        )
    return number


def _context_length(
    engine: InferenceEngine, chat: ChatFormat, given: int | None
) -> Callable[[], Awaitable[int]]:
    """Return a function that finds the context length: given, the engine's or the tokenizer's."""
    ask: Callable[[], Awaitable[int]] | None = getattr(engine, "context_length", None)
    if given is None and callable(ask):
        return ask
    limit = given or getattr(chat.tokenizer, "model_max_length", None)
    if not isinstance(limit, int) or not 1 <= limit < _NO_LIMIT:
        raise ConfigError(
            "neither the engine nor the tokenizer knows the context length: give context_length"
        )

    async def known() -> int:
        return limit

    return known


class ChoiceTasks:
    """A session's call under way; :meth:`close` must be called in the end."""

    def __init__(self, session: DirectSession, completer: Completer, prepared: Prepared) -> None:
        self.session = session
        self.prepared = prepared
        self._completer = completer
        # Bounded by the call's tokens: an engine samples no more of them.
        self._items: asyncio.Queue[Completed | AnyAgentError] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._sample(k)) for k in range(len(prepared.choices))]
        session.calls.add(self)

    async def next(self) -> Delta | Completion:
        """Return the next output of any choice; raise the error of a failed one."""
        item = await self._items.get()
        if isinstance(item, AnyAgentError):
            raise item
        return item

    async def whole(self) -> list[Completion]:
        """Return all choices in their order, when they have ended."""
        ended: dict[int, Completion] = {}
        while len(ended) < len(self.prepared.choices):
            item = await self.next()
            if isinstance(item, Completion):
                ended[item.choice.index] = item
        return [ended[k] for k in sorted(ended)]

    def fail(self, error: AnyAgentError) -> None:
        """End the call with an error, which comes after the outputs so far."""
        for task in self._tasks:
            task.cancel()
        self._items.put_nowait(error)

    async def close(self) -> None:
        """Cancel the choices that have not ended; a waiting reader gets an error."""
        self.fail(AnyAgentError("the call was closed"))
        await asyncio.wait(self._tasks)
        self.session.calls.discard(self)

    async def _sample(self, index: int) -> None:
        prepared = self.prepared
        run = self._completer.run(
            prepared, index, session_id=self.session.id, stream=prepared.call.stream
        )
        try:
            async with aclosing(run) as items:
                async for item in items:
                    self._items.put_nowait(item)
        except AnyAgentError as error:
            self._items.put_nowait(with_request_parameter(error, prepared.call))
        except Exception:
            log.exception("a model call failed")
            failure = AnyAgentError("the call failed inside the client; see the log")
            self._items.put_nowait(failure)
