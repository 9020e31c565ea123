"""Drives the demo's agents: opens sessions, calls the agent in a worker, rewards, finalizes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from any_agent.client.rl_client import RLClient
from any_agent.demo.task import Item, TaskTurn, is_correct, items, shuffled
from any_agent.errors import AnyAgentError, RunFinished, TooManyRequests
from any_agent.protocol.rl import SessionStarted

GROUP_SIZE = 8
DISCOUNT = 0.9
SESSION_TTL = 120.0
"""Seconds after which a session ends that nobody knows of, and a group goes on without it: where
a part of the service dies, the answer to an opening may be lost."""
_TIMEOUT = 120.0
"""Seconds in which the trainer must want a session again."""
_AGENT_TIMEOUT = 120.0
_POOL = 32
EVALS = 2
"""Eval sessions for every held-out prompt."""
_MAX_FAILED = 100


@dataclass(frozen=True, slots=True)
class Measures:
    """How well a phase's sessions went, on average."""

    accuracy: float
    """Share of sessions whose first answer was right."""
    reward: float
    """Of a session, as the trainer scores it: the mean over its turns of what each is worth."""
    turns: float
    """Per session."""
    tokens: float
    """Per answer."""


@dataclass(slots=True)
class Tally:
    """What a phase's sessions came to so far."""

    sessions: int = 0
    first_correct: int = 0
    reward: float = 0.0
    turns: int = 0
    tokens: int = 0
    """Sampled, as the agents' completions count them."""
    failed: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, turns: list[TaskTurn], right: list[bool]) -> None:
        self.sessions += 1
        self.first_correct += right[0]
        self.reward += score(right)
        self.turns += len(turns)
        self.tokens += sum(turn.tokens for turn in turns)

    def add_failure(self, error: Exception) -> None:
        self.failed += 1
        self.errors = [*self.errors[-4:], str(error)]

    def measures(self) -> Measures:
        sessions = max(1, self.sessions)
        return Measures(
            accuracy=self.first_correct / sessions,
            reward=self.reward / sessions,
            turns=self.turns / sessions,
            tokens=self.tokens / max(1, self.turns),
        )


def score(right: list[bool]) -> float:
    """A session's score: its last turn's outcome, discounted back, the mean over its turns."""
    return float(right[-1]) * sum(DISCOUNT**k for k in range(len(right))) / len(right)


class Worker:
    """One agent process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._jobs = 0

    async def run(self, item: Item, session: SessionStarted) -> list[TaskTurn]:
        """The agent's turns; RuntimeError with what it failed with, TimeoutError without any."""
        self._jobs += 1
        job = {"item": asdict(item), "base_url": session.base_url, "api_key": session.api_key}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job | {"job": self._jobs}).encode() + b"\n")
        reply: dict[str, Any] = {}
        async with asyncio.timeout(_AGENT_TIMEOUT):
            # An earlier job's, which took too long, may still come.
            while reply.get("job") != self._jobs:
                line = await self._process.stdout.readline()
                if not line:
                    raise RuntimeError("an agent process ended")
                reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return [TaskTurn(*turn) for turn in reply["turns"]]


@asynccontextmanager
async def workers(count: int) -> AsyncIterator[list[Worker]]:
    """Agent processes, ended with the context."""
    async with AsyncExitStack() as stack:
        started = []
        for _ in range(count):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "any_agent.demo.agent_process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # The service is on this machine, whatever leads to the others.
                env=os.environ | {"NO_PROXY": "*", "no_proxy": "*"},
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

    async def evaluate(self, tally: Tally) -> None:
        """Some eval sessions for every held-out prompt."""
        todo = iter(items(held_out=True) * EVALS)

        async def work(agent: Worker) -> None:
            for item in todo:
                await self._session(agent, item, tally, mode="eval")

        await self._all(work)

    async def train(self, tally: Tally) -> None:
        """Train sessions in groups until the run has finished."""
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
        """One session from its opening to its end. A failure is counted; the next one goes on."""
        session: SessionStarted | None = None
        try:
            session = await self._client.start_session(
                task_id=item.task_id, ttl=SESSION_TTL, wait=30.0, patience=_TIMEOUT, **opening
            )
            turns = await agent.run(item, session)
            right = [is_correct(turn.text, item) for turn in turns]
            for completion_id, reward in self._rewards(turns, right):
                await self._client.set_reward(session.api_key, reward, completion_id=completion_id)
            await self._client.finalize(session.api_key)
        except (RunFinished, TooManyRequests):
            raise
        except (RuntimeError, TimeoutError, AnyAgentError) as error:
            if session is not None:
                # Left open, it would keep its group waiting.
                with suppress(AnyAgentError):
                    await self._client.abort(session, "the demo's agent failed")
            tally.add_failure(error)
            if tally.failed > _MAX_FAILED:
                raise AnyAgentError(f"{tally.failed} sessions failed: {error}") from error
        else:
            tally.add(turns, right)

    def _rewards(self, turns: list[TaskTurn], right: list[bool]) -> list[tuple[str, float]]:
        """(completion id, reward): the last turn's outcome; in the control, another session's.

        There the session gets the return of another one, in such a way that each of its turns is
        worth just that: by the discount alone, a session of one turn would still score higher
        than one of two, and whoever was right at once has one.
        """
        if self._pool is None:
            return [(turns[-1].completion_id, float(right[-1]))]
        value = self._swapped(score(right))
        *earlier, last = [turn.completion_id for turn in turns]
        return [(id, value * (1 - DISCOUNT)) for id in earlier] + [(last, value)]

    def _swapped(self, value: float) -> float:
        """A recent other session's value, each given out once; a coin until there are enough."""
        assert self._pool is not None
        other = float(self._random.random() < 0.5)
        if len(self._pool) >= _POOL:
            other = self._pool.pop(self._random.randrange(len(self._pool)))
        self._pool.append(value)
        return other
