"""Drives the demo's agents: opens sessions, calls the agent in a worker, rewards, finalizes."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from any_agent.client import RLClient
from any_agent.demo.task import Item, is_correct, items, shuffled
from any_agent.errors import AnyAgentError, RunFinished
from any_agent.protocol import SessionStarted

GROUP_SIZE = 8
DISCOUNT = 0.9
_PATIENCE = 120.0
_POOL = 32
_EVALS = 2
_MAX_FAILED = 100


@dataclass(slots=True)
class Tally:
    """What a phase's sessions came to."""

    sessions: int = 0
    first_correct: int = 0
    correct: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def first_accuracy(self) -> float:
        return self.first_correct / max(1, self.sessions)


class Worker:
    """One agent process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, item: Item, session: SessionStarted) -> list[list[str]]:
        """The agent's turns, (completion id, text) each; RuntimeError with what it failed with."""
        job = {"item": asdict(item), "base_url": session.base_url, "api_key": session.api_key}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        async with asyncio.timeout(120):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("an agent process ended")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        turns: list[list[str]] = reply["turns"]
        return turns


@asynccontextmanager
async def workers(count: int) -> AsyncIterator[list[Worker]]:
    """Agent processes, ended with the context."""
    async with AsyncExitStack() as stack:
        started = []
        for _ in range(count):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "any_agent.demo.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # Ctrl-C at the terminal is this process's business.
                start_new_session=True,
            )
            stack.push_async_callback(_end, process)
            started.append(Worker(process))
        yield started


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


class Driver:
    """Runs sessions on the workers; ``permute`` gives each the reward of another one."""

    def __init__(
        self, client: RLClient, agents: list[Worker], *, seed: int, permute: bool = False
    ) -> None:
        self._client = client
        self._agents = agents
        self._random = random.Random(seed)
        self._pool: list[float] | None = [] if permute else None
        self._seed = seed

    async def evaluate(self) -> Tally:
        """Some eval sessions for every held-out prompt."""
        tally = Tally()
        todo = iter(items(held_out=True) * _EVALS)

        async def work(agent: Worker) -> None:
            for item in todo:
                await self._session(agent, item, tally, mode="eval")

        await self._all(work)
        return tally

    async def train(self) -> Tally:
        """Train sessions in groups until the run has finished."""
        tally = Tally()
        jobs = self._jobs()

        async def work(agent: Worker) -> None:
            while True:
                item, group = next(jobs)
                try:
                    await self._session(
                        agent, item, tally, mode="train", group_id=group, group_size=GROUP_SIZE
                    )
                except RunFinished:
                    return

        await self._all(work)
        return tally

    async def _all(self, work: Any) -> None:
        async with asyncio.TaskGroup() as tasks:
            for agent in self._agents:
                tasks.create_task(work(agent))

    def _jobs(self) -> Iterator[tuple[Item, str]]:
        """Each prompt as often as its group is large; epochs without end."""
        number = 0
        while True:
            for item in shuffled(items(held_out=False), self._seed + number):
                number += 1
                for _ in range(GROUP_SIZE):
                    yield item, f"{item.task_id}-{number}"

    async def _session(self, agent: Worker, item: Item, tally: Tally, **opening: Any) -> None:
        session = await self._client.start_session(
            task_id=item.task_id, wait=30.0, patience=_PATIENCE, **opening
        )
        try:
            turns = await agent.run(item, session)
            right = [is_correct(text, item) for _, text in turns]
            for completion_id, reward in self._rewards(turns, right):
                await self._client.set_reward(session.api_key, reward, completion_id=completion_id)
            await self._client.finalize(session.api_key)
        except (RuntimeError, TimeoutError, AnyAgentError) as error:
            # Left open, it would keep its group waiting.
            with suppress(AnyAgentError):
                await self._client.abort(session, "the demo's agent failed")
            tally.failed += 1
            tally.errors = [*tally.errors[-4:], str(error)]
            if tally.failed > _MAX_FAILED:
                raise AnyAgentError(f"{tally.failed} sessions failed: {error}") from error
            return
        tally.sessions += 1
        tally.first_correct += right[0]
        tally.correct += right[-1]

    def _rewards(self, turns: list[list[str]], right: list[bool]) -> list[tuple[str, float]]:
        """(completion id, reward): the last turn's outcome; in the control, another session's.

        There the session gets the return of another one, in such a way that each of its turns is
        worth just that: by the discount alone, a session of one turn would still score higher
        than one of two, and whoever was right at once has one.
        """
        reward = 1.0 if right[-1] else 0.0
        if self._pool is None:
            return [(turns[-1][0], reward)]
        value = self._swapped(sum(reward * DISCOUNT**k for k in range(len(turns))) / len(turns))
        *earlier, last = [completion_id for completion_id, _ in turns]
        return [(id, value * (1 - DISCOUNT)) for id in earlier] + [(last, value)]

    def _swapped(self, value: float) -> float:
        """A recent other session's value, each given out once; a coin until there are enough."""
        assert self._pool is not None
        other = float(self._random.random() < 0.5)
        if len(self._pool) >= _POOL:
            other = self._pool.pop(self._random.randrange(len(self._pool)))
        self._pool.append(value)
        return other
