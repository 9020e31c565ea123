"""Samples a call's choices concurrently, each in a task of its own."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from any_agent.completions.call_types import Completed, Completion, Delta, Prepared
from any_agent.completions.completer import Completer
from any_agent.completions.prepare import with_request_parameter
from any_agent.errors import AnyAgentError

log = logging.getLogger(__name__)


class ChoiceTasks:
    """A call under way; :meth:`close` must be called in the end."""

    def __init__(
        self, completer: Completer, prepared: Prepared, *, session_id: str, stream: bool
    ) -> None:
        self.prepared = prepared
        self._completer = completer
        self._session_id = session_id
        self._stream = stream
        # Bounded by the call's tokens: an engine samples no more of them.
        self._items: asyncio.Queue[Completed | AnyAgentError] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._sample(k)) for k in range(len(prepared.choices))]

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

    async def _sample(self, index: int) -> None:
        run = self._completer.run(
            self.prepared, index, session_id=self._session_id, stream=self._stream
        )
        try:
            async with aclosing(run) as items:
                async for item in items:
                    self._items.put_nowait(item)
        except AnyAgentError as error:
            self._items.put_nowait(with_request_parameter(error, self.prepared.call))
        except Exception:
            log.exception("a model call failed")
            failure = AnyAgentError("the call failed inside the client; see the log")
            self._items.put_nowait(failure)
