"""The demo's agents: an `AgentRunner` that asks, rewards and counts."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from any_agent.client.environment import PLACEHOLDER_KEY
from any_agent.demo.agent import answer
from any_agent.demo.setups import TINY, Setup
from any_agent.demo.state import Tally
from any_agent.demo.task import DISCOUNT, Item, TaskTurn, messages, score, shuffled
from any_agent.runtime.environment import environment_with
from any_agent.sdk import AgentRunner

GROUP_SIZE = 8
MAX_FAILURES = 100  # consecutive failed sessions that end the demo
_EPOCHS = 1000  # more passes over the prompts than any run needs; training ends with the run
_POOL = 32  # scores that the control collects before it swaps them


class Driver:
    """Runs the agents on the service at ``url``; ``permute`` swaps the sessions' rewards."""

    def __init__(self, url: str, *, seed: int, permute: bool = False, setup: Setup = TINY) -> None:
        self._url = url
        self._setup = setup
        self._seed = seed
        self._random = random.Random(seed)
        self._pool: list[float] | None = [] if permute else None
        self._lock = threading.Lock()

    async def evaluate(self, tally: Tally) -> None:
        """Run the setup's eval sessions on every held-out prompt."""
        setup = self._setup
        prompts, greedy = setup.task.items(held_out=True), setup.greedy_evals
        await self._run(prompts, tally, greedy=greedy, mode="eval", group_size=setup.evals)

    async def train(self, tally: Tally) -> None:
        """Run groups of train sessions until the run has finished."""
        prompts = shuffled(self._setup.task.items(held_out=False), self._seed)
        await self._run(prompts, tally, mode="train", group_size=GROUP_SIZE, epochs=_EPOCHS)

    async def _run(
        self, prompts: Sequence[Item], tally: Tally, *, greedy: bool = False, **options: Any
    ) -> None:
        """Run the agent on each prompt; a failure is counted, and the next session goes on.

        Raises AnyAgentError when too many sessions fail in a row or the service opens none.
        """

        task, patience = self._setup.task, self._setup.patience

        def agent(row: dict[str, str]) -> dict[str, float]:
            item = Item(**row)
            is_correct = partial(task.is_correct, item=item)
            asked = messages(item, task.system)
            turns = answer(asked, is_correct, task.retry, greedy=greedy)
            right = [is_correct(turn.text) for turn in turns]
            with self._lock:
                tally.add(turns, right)
                return self.rewards_for(turns, right)

        with environment_with(_environment(self._url)):
            runner = _QuietRunner(
                concurrency=self._setup.agents,
                retries=0,
                max_failures=MAX_FAILURES,
                timeout=patience,
                ttl=patience,
                wait=patience,
                progress=False,
                **options,
            )
            results = await runner.arun(agent, [asdict(item) for item in prompts])
        for result in results.failed:
            tally.add_failure(result.error or "")

    def rewards_for(self, turns: Sequence[TaskTurn], right: Sequence[bool]) -> dict[str, float]:
        """Return rewards by completion id: the last turn's outcome, or the control's.

        The control gives every turn the return of another session. With a reward for the last turn
        only, the discount would still favour sessions of one turn, which are right at once.
        """
        if self._pool is None:
            return {turns[-1].completion_id: float(right[-1])}
        value = self.swap(score(right))
        *earlier, last = [turn.completion_id for turn in turns]
        return {**dict.fromkeys(earlier, value * (1 - DISCOUNT)), last: value}

    def swap(self, value: float) -> float:
        """Return another recent session's value, each at most once; at first a random one."""
        assert self._pool is not None
        other = float(self._random.random() < 0.5)
        if len(self._pool) >= _POOL:
            other = self._pool.pop(self._random.randrange(len(self._pool)))
        self._pool.append(value)
        return other


class _QuietRunner(AgentRunner):
    """A runner that prints nothing, as the demo's display shows its end."""

    def announce(self, text: str) -> None:
        pass


def _environment(url: str) -> dict[str, str]:
    """Return variables that give agents the service and hide the user's own keys and proxies."""
    return {
        **dict.fromkeys(("ANY_AGENT_URL", "OPENAI_BASE_URL"), f"{url}/v1"),
        **dict.fromkeys(("ANY_AGENT_API_KEY", "OPENAI_API_KEY"), PLACEHOLDER_KEY),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "*"),
    }
