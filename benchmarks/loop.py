"""Trajectories per second of the whole service, training and not: ``python benchmarks/loop.py``.

The demo's tiny model behind a real service (engine, proxy, trainer; each one process), used by
concurrent scripted agents over HTTP: two calls, a reward, the end, in groups of eight. First with
training on, then the same load as eval sessions on a service without a trainer. The learning rate
is negligible, so that both sample from the same policy. Rewards are drawn at random, so that no
group is without variance. CPU seconds are of each process, per trajectory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
from common import child, cpu_seconds, machine

from any_agent.config import Config, load_config
from any_agent.demo.driver import GROUP_SIZE
from any_agent.demo.run import demo_config
from any_agent.demo.task import RETRY, Item, items, messages
from any_agent.launcher import Node, NodeOptions

MODULES = {"any_agent.engine.embedded": "engine", "proxy_ext": "proxy", "trainer": "trainer"}
LOAD = "agents"


@dataclass(frozen=True, slots=True)
class Phase:
    """What one measured window came to."""

    trajectories: int
    seconds: float
    steps: int
    cpu: dict[str, float]
    """CPU seconds by process."""

    @property
    def rate(self) -> float:
        return self.trajectories / self.seconds


class Agents:
    """Scripted agents: as fast as the service lets them, until told to stop."""

    def __init__(self, http: aiohttp.ClientSession, url: str, *, train: bool) -> None:
        self._http = http
        self._url = url
        self._train = train
        self._random = random.Random(0)
        self._jobs = self._all_jobs()
        self.done = 0

    async def run(self, count: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            item, opening = next(self._jobs)
            await self._session(item, opening)
            self.done += 1

    def _all_jobs(self) -> Iterator[tuple[Item, dict[str, Any]]]:
        for number, item in enumerate(itertools.cycle(items(held_out=False))):
            for _ in range(GROUP_SIZE):
                if self._train:
                    group = {"group_id": f"{item.task_id}-{number}", "group_size": GROUP_SIZE}
                    yield item, {"mode": "train", "task_id": item.task_id, **group, "wait": 60}
                else:
                    yield item, {"mode": "eval", "task_id": item.task_id}

    async def _session(self, item: Item, opening: dict[str, Any]) -> None:
        key = (await self._post("/rl/v1/start_session", opening, ""))["api_key"]
        talk: list[dict[str, Any]] = [*messages(item)]
        for _ in range(2):
            body = {"model": "policy", "messages": talk}
            answer = await self._post("/v1/chat/completions", body, key)
            text = answer["choices"][0]["message"]["content"]
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": RETRY}]
        reward = float(self._random.random() < 0.5)
        await self._post("/rl/v1/set_reward", {"reward": reward}, key)
        await self._post("/rl/v1/finalize", {}, key)

    async def _post(self, path: str, body: dict[str, Any], key: str) -> Any:
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        for attempt in itertools.count():
            async with self._http.post(
                self._url + path, data=orjson.dumps(body), headers=headers
            ) as response:
                answer = await response.read()
                if response.status == 200:
                    return orjson.loads(answer)
                if response.status != 429 or attempt > 20:
                    raise RuntimeError(f"{path}: {response.status} {answer[:300]!r}")
            await asyncio.sleep(0.2)


def processes() -> dict[str, int]:
    """The service's process ids by part, and this process, which is the agents."""
    found = {LOAD: os.getpid()}
    for process in psutil.Process().children():
        command = process.cmdline()
        if "-m" in command and (part := MODULES.get(command[command.index("-m") + 1])):
            found[part] = process.pid
    return found


async def measure(node: Node, args: argparse.Namespace, *, train: bool) -> Phase:
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        agents = Agents(http, node.url, train=train)
        load = asyncio.create_task(agents.run(args.agents))
        try:
            await _until(load, args.warm_up)
            pids = processes()
            before = {part: cpu_seconds(pid) for part, pid in pids.items()}
            done, steps, began = agents.done, _steps(node), time.perf_counter()
            await _until(load, args.seconds)
            return Phase(
                agents.done - done,
                time.perf_counter() - began,
                _steps(node) - steps,
                {part: cpu_seconds(pid) - before[part] for part, pid in pids.items()},
            )
        finally:
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load


async def _until(load: asyncio.Task[None], seconds: float) -> None:
    """Let the load run; raise what it fails with."""
    done, _ = await asyncio.wait([load], timeout=seconds)
    if done:
        await load


def _steps(node: Node) -> int:
    path = node.dir.metrics
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def run_phase(folder: Path, args: argparse.Namespace, *, train: bool) -> Phase:
    quiet = NodeOptions(train=train, say=lambda _: None)
    with Node(_config(folder, train=train), quiet) as node:
        phase = asyncio.run(measure(node, args, train=train))
        node.check()
    return phase


def _config(folder: Path, *, train: bool) -> Config:
    """The demo's settings, but for the learning rate, the number of steps and the trial's name."""
    demo = demo_config(folder, seed=0, steps=10**6)
    changes = {"trial": f"train-{train}", "train.lr": 1e-9, "train.checkpoint_every": 10**6}
    settings = {**_flat(demo.dump()), **changes}
    return load_config(None, [f"{k}={v}" for k, v in settings.items()], environ={})


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names; what is None stays the default."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            out[prefix + key] = orjson.dumps(value).decode() if isinstance(value, list) else value
    return out


def print_table(phases: dict[str, Phase]) -> None:
    parts = [*MODULES.values(), LOAD]
    print(f"\n{'':<18} {'trajectories/s':>14} {'steps/s':>8}   CPU ms per trajectory")
    print(f"{'':<18} {'':>14} {'':>8}   {'  '.join(f'{p:>7}' for p in parts)}")
    for name, phase in phases.items():
        cpu = Counter(phase.cpu)
        each = "  ".join(
            f"{1000 * cpu[p] / phase.trajectories:>7.1f}" if p in cpu else f"{'-':>7}"
            for p in parts
        )
        print(f"{name:<18} {phase.rate:>14.1f} {phase.steps / phase.seconds:>8.2f}   {each}")
    with_training, without = phases.values()
    print(f"{'ratio':<18} {with_training.rate / without.rate:>14.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=32, help="at once")
    parser.add_argument("--seconds", type=float, default=12.0, help="measured in each phase")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before measuring")
    args = parser.parse_args()
    print(f"{machine()}; {args.agents} agents, {args.seconds:g} s each", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "model.log"
        # More threads than free cores cost such a small model ten times the time.
        model = ["-m", "any_agent.demo.model", str(folder / "model")]
        with child(model, log, {"OMP_NUM_THREADS": "1"}) as process:
            if process.wait(300):
                raise RuntimeError(log.read_text())
        phases = {
            "training": run_phase(folder, args, train=True),
            "eval, no trainer": run_phase(folder, args, train=False),
        }
    print_table(phases)


if __name__ == "__main__":
    main()
