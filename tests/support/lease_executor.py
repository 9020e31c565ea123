"""A scripted rank, its scripted polls, and patience for what happens on another thread."""

from __future__ import annotations

import asyncio
import threading

from any_agent.client.rl_client import RLClient
from any_agent.errors import AnyAgentError, Conflict
from any_agent.protocol.training import Capacity, Rejection
from any_agent.record import pack_trajectories
from any_agent.workflow import Episode


class Service(RLClient):
    """Remembers what it was told; ``failures`` are raised by the next calls of a kind."""

    def __init__(self, script: Scripted | None = None) -> None:
        self.script = script or Scripted()
        self.limits: list[int] = []
        self.held: list[list[str]] = []
        self.acks: list[tuple[list[str], list[str]]] = []
        self.failures: dict[str, list[AnyAgentError]] = {}
        self.steps: list[int | None] = []
        """Of each ack."""
        self.lost: set[str] = set()
        self.state = {"admitted": 0, "reserved": 0, "waiting": 0, "running": 0, "buffered": 0}
        self.closed = False

    def _maybe_fail(self, kind: str) -> None:
        if self.failures.get(kind):
            raise self.failures[kind].pop(0)

    async def set_capacity(
        self,
        *,
        limit: int,
        ttl: float,
        owner: str,
        held: list[str],
        number: int = 0,
        retry_for: float | None = None,
    ) -> Capacity:
        self._maybe_fail("capacity")
        assert owner == "me"
        self.limits.append(limit)
        self.held.append(held)
        return Capacity(**self.state, limit=limit)

    async def ack(
        self, *, owner: str, trained: list[str], rejected: list[Rejection], step: int | None = None
    ) -> int:
        self._maybe_fail("ack")
        if self.lost & {*trained, *(r.session_id for r in rejected)}:
            raise Conflict("a lease was lost")
        self.acks.append((trained, [r.session_id for r in rejected]))
        self.steps.append(step)
        return len(trained) + len(rejected)

    async def lease(self, *, owner: str, wait: float, max_groups: int = 1) -> bytes | None:
        assert owner == "me"
        return await self.script.poll()

    async def close(self) -> None:
        self.closed = True


class Scripted:
    """The answers to polls: episodes (or errors) from a queue that any thread may fill."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._queue: asyncio.Queue[Episode | AnyAgentError | None] = asyncio.Queue()
        self.started = threading.Event()

    def give(self, *items: Episode | AnyAgentError | None) -> None:
        assert self.started.wait(60)
        assert self.loop is not None
        for item in items:
            self.loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def poll(self) -> bytes | None:
        self.loop = asyncio.get_running_loop()
        self.started.set()
        item = await self._queue.get()
        if isinstance(item, AnyAgentError):
            raise item
        return None if item is None else pack_trajectories(item)
