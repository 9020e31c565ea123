"""Trajectories per second of the whole service: ``python benchmarks/loop.py``.

The demo's tiny model behind a real service of two ranks (engines, proxies, router, trainer; each
a process), used by concurrent scripted agents over HTTP. Two tables:

- the cost of training: agents that never pause (two calls, a reward, the end, in groups of eight),
  first with training on, then as eval sessions on a service without a trainer. The learning rate
  is negligible, so that both sample from the same policy; rewards are random, so that every group
  has variance. CPU seconds are those of the processes, per trajectory.
- the gain by eta: see `staleness.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import staleness
from agents import Job, Service, groups, load, look_after, make_model, service
from common import cpu_seconds, finish, machine, parser, ratio

from any_agent.config import Config
from any_agent.demo.run import RANKS, demo_config
from any_agent.demo.task import RETRY, items
from any_agent.launcher import Node, NodeOptions

PARTS = ("engine", "proxy", "router", "trainer", "agents")
AGENTS, SECONDS = 32, 12.0
TO_START = 180.0
"""The most seconds to the first step, and to a trajectory."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The result of one measured window."""

    trajectories: int
    seconds: float
    steps: int
    cpu: dict[str, float]
    """CPU seconds by kind of part, all ranks together."""

    @property
    def rate(self) -> float:
        return self.trajectories / self.seconds


class Agents:
    """Work as fast as the service allows."""

    def __init__(self, service: Service, *, train: bool) -> None:
        self._service = service
        self._random = random.Random(0)
        self._jobs: Iterator[Job] = groups(items(held_out=False))
        self._train = train
        self.done = 0

    async def work(self) -> None:
        for item, group in self._jobs:
            key, talk = await self._service.open(item, group if self._train else "")
            for _ in range(2):
                await self._service.ask(key, talk)
                talk.append({"role": "user", "content": RETRY})
            await self._service.end(key, float(self._random.random() < 0.5))
            self.done += 1


def processes(node: Node) -> list[tuple[str, int]]:
    """Return the processes of the service by kind, and this one, which runs the agents."""
    found = [("agents", os.getpid())]
    for name, part in node.parts.items():
        kind = name.partition("-")[0]
        found.append(("proxy" if kind == "rank" else kind, part.pid))
    return found


async def measure(node: Node, seconds: float, *, train: bool) -> Phase:
    async with service(node) as reached:
        agents = Agents(reached, train=train)
        async with load(agents.work, AGENTS) as running:
            if train:
                await look_after(node, running, TO_START, until=lambda: _steps(node) > 0)
            await look_after(node, running, seconds / 4)
            pids = processes(node)
            before = [cpu_seconds(pid) for _, pid in pids]
            done, steps, began = agents.done, _steps(node), time.perf_counter()
            await look_after(node, running, seconds)
            # A busy machine may need longer for the first one.
            await look_after(node, running, TO_START, until=lambda: agents.done > done)
            cpu = dict.fromkeys(PARTS, 0.0)
            for (kind, pid), spent in zip(pids, before, strict=True):
                cpu[kind] += cpu_seconds(pid) - spent
            lasted = time.perf_counter() - began
            return Phase(agents.done - done, lasted, _steps(node) - steps, cpu)


def _steps(node: Node) -> int:
    path = node.dir.metrics
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def run_phase(folder: Path, seconds: float, ranks: int, *, train: bool) -> Phase:
    quiet = NodeOptions(train=train, say=lambda _: None)
    with Node(_config(folder, ranks, train=train), quiet) as node:
        return asyncio.run(measure(node, seconds, train=train))


def _config(folder: Path, ranks: int, *, train: bool) -> Config:
    """Return the demo's settings with another learning rate, number of steps and trial."""
    demo = demo_config(folder, seed=0, steps=10**6, ranks=ranks)
    slow: dict[str, Any] = {"lr": 1e-9, "checkpoint_every": 10**6}
    return demo.model_copy(
        update={"trial": f"train-{train}", "train": demo.train.model_copy(update=slow)}
    )


def print_cost(phases: dict[str, Phase]) -> None:
    print(f"\n{'what training costs':<20} {'trajectories/s':>14} {'steps/s':>8}", end="")
    print(f"   CPU ms per trajectory\n{'':<44}   {'  '.join(f'{p:>7}' for p in PARTS)}")
    for name, phase in phases.items():
        each = "  ".join(
            f"{1000 * phase.cpu[p] / phase.trajectories:>7.1f}" if phase.cpu[p] else f"{'-':>7}"
            for p in PARTS
        )
        print(f"{name:<20} {phase.rate:>14.1f} {phase.steps / phase.seconds:>8.2f}   {each}")
    with_training, without = phases.values()
    ratio("trajectories a second, eval / training", without.rate, with_training.rate)
    print(f"{'ratio':<20} {with_training.rate / without.rate:>14.2f}", flush=True)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--only", choices=("cost", "eta"), help="print only this table")
    flags.add_argument("--model", type=Path, help="one that any_agent.demo.model made")
    flags.add_argument(
        "--sigma", type=float, default=staleness.SIGMA, help="length of the agents' tail"
    )
    args = flags.parse_args()
    seconds = SECONDS / 3 if args.quick else SECONDS
    ranks = RANKS
    if args.smoke:
        seconds, args.only, ranks = 1.0, "cost", 1
    print(f"{machine()}; {ranks} ranks", flush=True)
    with tempfile.TemporaryDirectory(prefix="any-agent-loop-") as name:
        folder = Path(name)
        if args.only != "eta":
            if args.model is None:
                make_model(folder / "model", 0)
            else:
                shutil.copytree(args.model, folder / "model")
            phases = {
                "training": run_phase(folder, seconds, ranks, train=True),
                "eval, no trainer": run_phase(folder, seconds, ranks, train=False),
            }
            print_cost(phases)
        if args.only != "cost":
            staleness.compare(folder, sigma=args.sigma, quick=args.quick)
    finish(args)


if __name__ == "__main__":
    main()
