"""The gain by tokens that are up to two steps old; a part of `loop.py`.

Agents whose work has a long tail train the demo's tiny model twice from the same start: with
`rollout.eta=0`, where a step's sessions are opened once the step before is done, and with
`rollout.eta=2`, where agents continue meanwhile. Everything else is the same: 192 agents, the order
of prompts, and the time of the k-th session's agent. The agent tries each answer out, which
takes it a log-normal time: half of them under a sixth of a second, one in a hundred over 16 times
as long. An agent sleeps for that time, so the tail decides how long a step takes. A
group whose members all score alike is replaced by another one, so that with eta 0 a step may wait
for several tails in a row.

Measured from the end of the first step to the end of the last one, by the trainer's own record
(`metrics.jsonl`): the start is not included, nor is the first batch, which finds the service empty.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from agents import Job, Service, groups, load, look_after, make_model, service

from any_agent.config import Config
from any_agent.demo.run import RANKS, demo_config
from any_agent.demo.task import RETRY, Item, is_correct, items, score, shuffled
from any_agent.errors import RunFinished
from any_agent.launcher import Node, NodeOptions

ETAS = (0, 2)
SEEDS, STEPS = 2, 16
QUICK_SEEDS, QUICK_STEPS = 1, 8
MEDIAN, SIGMA = 0.15, 1.2
"""Seconds that an agent needs to try an answer out: log-normal."""
TRIES = 2
"""The most answers of a session."""
AGENTS = 192
"""Sessions that may be open at once (`rollout.max_concurrent`): three batches."""
ASKED = 3
"""Eval sessions per held-out prompt, before and after."""
ASKING = 48
"""Eval sessions at once."""
LAST = 256
"""The last sessions that agents ended, whose mean score is shown. Sessions that steps took would
leave out groups whose members all score alike, which most do at the end."""
EQUAL = 0.05
"""Final scores of held-out prompts that differ by less, averaged over seeds, count as equal."""
_LONGEST = 300.0
"""Seconds of one run's training."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training from its first to its last step."""

    seed: int
    eta: int
    steps: Sequence[dict[str, Any]]
    """The lines of `metrics.jsonl`."""
    ended: Sequence[tuple[float, float]]
    """The time (Unix) when each agent's session was finalized, and its score, in order."""
    before: float
    after: float
    """Mean score of held-out prompts."""

    @property
    def _begin(self) -> float:
        return float(self.steps[0]["time"])

    @property
    def _end(self) -> float:
        return float(self.steps[-1]["time"])

    @property
    def seconds(self) -> float:
        return self._end - self._begin

    @property
    def finalized(self) -> float:
        """Return the trajectories per second that agents ended."""
        return sum(self._begin < at <= self._end for at, _ in self.ended) / self.seconds

    @property
    def trained(self) -> float:
        """Return the trajectories per second that steps learned from."""
        return self.each(lambda step: step["sessions"]) * (len(self.steps) - 1) / self.seconds

    @property
    def left_out(self) -> float:
        """Return the share of the steps' sessions that were too old."""
        stale = self.each(lambda step: step["left_out"].get("stale", 0))
        return stale / (stale + self.each(lambda step: step["sessions"]))

    @property
    def reward(self) -> float:
        return mean([score for at, score in self.ended if at <= self._end][-LAST:])

    def each(self, read: Callable[[dict[str, Any]], float]) -> float:
        """Return the mean of a step's figure, without the first step."""
        return mean(float(read(step)) for step in self.steps[1:])


class Agents:
    """Agents that take their time; ``ended`` is :class:`Run`'s."""

    def __init__(self, service: Service, seed: int, sigma: float) -> None:
        self._service = service
        self._seed = seed
        self._sigma = sigma
        self._jobs: Iterator[tuple[int, Job]] = enumerate(
            groups(shuffled(items(held_out=False), seed))
        )
        self.ended: list[tuple[float, float]] = []

    async def work(self) -> None:
        """Run sessions until the run has finished."""
        for number, (item, group) in self._jobs:
            # Seeded by the session's number, so that both runs have the same agents.
            draws = random.Random(f"{self._seed}-{number}")
            needs = [MEDIAN * draws.lognormvariate(0.0, self._sigma) for _ in range(TRIES)]
            try:
                reached = await session(self._service, item, group, needs)
            except RunFinished:
                return
            self.ended.append((time.time(), reached))


async def session(
    service: Service, item: Item, group: str, needs: Sequence[float] = (0.0,) * TRIES
) -> float:
    """Run one session, which ends at the first right answer; return its score.

    ``needs``: seconds for trying out the first and the second answer.
    """
    key, talk = await service.open(item, group)
    right: list[bool] = []
    for seconds in needs:
        right.append(is_correct(await service.ask(key, talk), item))
        await asyncio.sleep(seconds)
        if right[-1]:
            break
        talk.append({"role": "user", "content": RETRY})
    await service.end(key, float(right[-1]))
    return score(right)


async def held_out(node: Node, service: Service) -> float:
    """Return the mean score of eval sessions on prompts that are never trained on."""
    todo = iter(items(held_out=True) * ASKED)
    scores: list[float] = []

    async def work() -> None:
        scores.extend([await session(service, item, "") for item in todo])

    async with load(work, ASKING) as running:
        await look_after(node, running, _LONGEST, until=running.done)
    return mean(scores)


async def _train(node: Node, seed: int, eta: int, sigma: float) -> Run:
    async with service(node) as reached:
        before = await held_out(node, reached)
        agents = Agents(reached, seed, sigma)
        async with load(agents.work, AGENTS) as running:
            await look_after(node, running, _LONGEST, until=node.check)
        lines = [json.loads(line) for line in node.dir.metrics.read_text().splitlines()]
        return Run(seed, eta, lines, agents.ended, before, await held_out(node, reached))


def _config(folder: Path, *, seed: int, eta: int, steps: int) -> Config:
    """Return the demo's settings with another eta and trial."""
    demo = demo_config(folder, seed=seed, steps=steps, ranks=RANKS)
    rollout = demo.rollout.model_copy(update={"eta": eta})
    return demo.model_copy(update={"trial": f"eta-{eta}", "rollout": rollout})


def compare(folder: Path, *, sigma: float, quick: bool) -> None:
    """Train with each eta from each seed, in turns, and print the results."""
    seeds, steps = (QUICK_SEEDS, QUICK_STEPS) if quick else (SEEDS, STEPS)
    print(
        f"\nwhat eta buys: {steps} steps of 64 sessions, {AGENTS} agents; trying out an answer "
        f"takes {MEDIAN} s (median), log-normal with sigma {sigma:g}"
    )
    print(
        f"{'seed':>4} {'eta':>3} {'seconds':>8} {'s/step':>7} {'waiting':>8} {'finalized/s':>12} "
        f"{'trained/s':>10} {'age':>5} {'too old':>8} {'agents':>7} {'held out':>14}",
        flush=True,
    )
    runs: list[Run] = []
    for seed in range(seeds):
        here = folder / f"seed-{seed}"
        here.mkdir()
        make_model(here / "model", seed)
        for eta in ETAS if seed % 2 == 0 else reversed(ETAS):
            config = _config(here, seed=seed, eta=eta, steps=steps)
            with Node(config, NodeOptions(say=lambda _: None)) as node:
                runs.append(asyncio.run(_train(node, seed, eta, sigma)))
            _print_run(runs[-1])
    _print_ratios(runs)


def _print_run(run: Run) -> None:
    each = run.seconds / (len(run.steps) - 1)
    held = f"{run.before:.2f} -> {run.after:.3f}"
    print(
        f"{run.seed:>4} {run.eta:>3} {run.seconds:>8.1f} {each:>7.2f} "
        f"{run.each(lambda step: step['seconds']['wait']):>8.2f} {run.finalized:>12.1f} "
        f"{run.trained:>10.1f} {run.each(lambda step: step['staleness_mean']):>5.2f} "
        f"{run.left_out:>8.1%} {run.reward:>7.3f} {held:>14}",
        flush=True,
    )


def _print_ratios(runs: Sequence[Run]) -> None:
    sync, ahead = ([run for run in runs if run.eta == eta] for eta in ETAS)

    def ratio(read: Callable[[Run], float]) -> float:
        return mean(map(read, ahead)) / mean(map(read, sync))

    def more(read: Callable[[Run], float]) -> float:
        return mean(map(read, ahead)) - mean(map(read, sync))

    print(
        f"eta {ETAS[1]} over eta {ETAS[0]}: {ratio(lambda run: run.finalized):.2f} x finalized/s, "
        f"{ratio(lambda run: run.trained):.2f} x trained/s"
    )
    final = more(lambda run: run.after)
    print(
        f"final reward, held out: {final:+.3f}, "
        f"{'equal' if abs(final) <= EQUAL else 'NOT equal'} within {EQUAL}",
        flush=True,
    )
