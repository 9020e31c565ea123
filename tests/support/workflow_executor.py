"""Workflows that do what a test says, and what they return."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from any_agent.config import RolloutConfig
from any_agent.rollout import WorkflowExecutor
from any_agent.workflow import RolloutWorkflow, context
from tests.support.workflow.tensors import tensors

LIMIT = 60.0
"""Seconds until a test that waits gives up."""


REJECT = "reject"
"""What `Doing` is told so that it returns None."""


def items(count: int) -> list[dict[str, Any]]:
    return [{"n": n} for n in range(count)]


def numbers(result: Any) -> list[int]:
    """The items that a batch's rows are of."""
    return [int(n) for n in result["input_ids"][:, 2]]


class Doing(RolloutWorkflow):
    """Does with each item what ``do`` says: returns it, raises it, or awaits it."""

    def __init__(self, do: Callable[[dict[str, Any]], Any] | None = None) -> None:
        self._do = do
        self.running = 0
        self.most = 0
        self.seen: list[context.WorkflowContext] = []
        self.data: list[dict[str, Any]] = []

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        self.seen.append(context.get())
        self.data.append(data)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            done = self._do(data) if self._do is not None else None
            if asyncio.iscoroutine(done):
                done = await done
            if isinstance(done, BaseException):
                raise done
            if done == REJECT:
                return None
            return tensors([1, 2, data["n"]]) if done is None else done
        finally:
            self.running -= 1


class Gated(RolloutWorkflow):
    """Each episode waits until a test, on another thread, lets it go."""

    def __init__(self) -> None:
        self._gates: dict[int, list[asyncio.Future[Any]]] = {}
        self.cancelled: list[int] = []

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        gate = asyncio.get_running_loop().create_future()
        self._gates.setdefault(data["n"], []).append(gate)
        try:
            await gate
        except asyncio.CancelledError:
            self.cancelled.append(data["n"])
            raise
        return tensors([1, 2, data["n"]])

    @property
    def waiting(self) -> list[int]:
        """The items whose episodes wait, in the order of their beginning."""
        return [n for n, gates in self._gates.items() for gate in gates if not gate.done()]

    def let(self, *which: int) -> None:
        for n in which:
            self._let(n)

    def _let(self, n: int) -> None:
        until(lambda: n in self.waiting)
        for gate in self._gates[n]:
            gate.get_loop().call_soon_threadsafe(_open, gate)
        until(lambda: n not in self.waiting)


def _open(gate: asyncio.Future[Any]) -> None:
    if not gate.done():
        gate.set_result(None)


@contextmanager
def executor(engine: Any = None, **config: Any) -> Iterator[WorkflowExecutor]:
    """One without an engine, unless it is given one; ``options`` are the executor's."""
    options = config.pop("options", {})
    values = {"batch_size": 4, "max_concurrent": 8, "eta": 1} | config
    with WorkflowExecutor(engine, RolloutConfig(**values), **options) as executor:
        yield executor


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
