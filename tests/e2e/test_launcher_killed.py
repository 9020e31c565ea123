"""kill -9 of `any-agent serve` while its real trainer publishes weights: nothing outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import psutil
import pytest

from any_agent.client.rl_client import RLClient
from any_agent.errors import AnyAgentError
from any_agent.rundir.layout import RunDir
from tests.support.e2e.live_run import agent
from tests.support.e2e.serving import Served, serve
from tests.support.launcher.children import is_alive
from tests.support.waiting import meanwhile, until

SHORT, LONG = 2, 7
"""Kills at moments spread over the publication of weights; `--long` makes more of them."""
SPREAD = 0.6
"""Seconds after new weights are on the disk within which the launcher is killed."""
BOUND = 10.0
"""Seconds after which no process of a killed launcher is left."""
SETTINGS = {
    "model.enable_thinking": "false",
    "server.port": 0,
    "server.ranks": 1,
    "sampling.max_new_tokens": 8,
    "sessions.group_size": 1,
    "rollout.batch_size": 2,
    # The sessions that a kill leaves behind keep their slots.
    "rollout.eta": 50,
    "rollout.max_concurrent": 100,
    "train.steps": 100_000,
    "train.checkpoint_every": 50,
}


@pytest.fixture
def arguments(tmp_path: Path, tiny_model_dir: Path) -> list[str]:
    given = [f"{name}={value}" for name, value in SETTINGS.items()]
    return ["--model", str(tiny_model_dir), f"root={tmp_path}/runs", *given]


def run_of(folder: Path) -> RunDir:
    (settings,) = (folder / "runs").glob("*/*/*/resolved.yaml")
    return RunDir(settings.parent)


@contextlib.asynccontextmanager
async def agents(url: str) -> AsyncIterator[None]:
    """Agents that work until the end of the block, or until the service is gone."""
    numbers, rewards = itertools.count(random.randrange(10**9)), random.Random()

    async def work(service: RLClient) -> None:
        while True:
            with contextlib.suppress(AnyAgentError, openai.OpenAIError):
                await agent(service, next(numbers), rewards, 1, turns=1)
            await asyncio.sleep(0.05)

    async with (
        RLClient(url, retry_for=0) as service,
        meanwhile(*(work(service) for _ in range(4))),
    ):
        yield


def newest(run: RunDir) -> int:
    return max((int(path.name[1:]) for path in run.weights.glob("v*")), default=0)


async def next_version(run: RunDir) -> None:
    """Wait for weights that are newer than the newest ones."""
    before = newest(run)
    await until(lambda: newest(run) > before, "a publication", within=300)


async def left_of(served: Served) -> list[str]:
    """Kill the launcher; return the processes of the service that are left after the bound."""
    parts = served.children
    assert len(parts) >= 4, "an engine, a rank, the router and the trainer"
    names = {part.pid: " ".join(part.cmdline()[:4]) for part in parts}
    served.process.kill()
    served.process.wait()
    with contextlib.suppress(AssertionError):
        await until(lambda: not any(map(is_alive, parts)), within=BOUND)
    left = [part for part in parts if is_alive(part)]
    for part in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            part.kill()
    return [names[part.pid] for part in left]


async def test_no_part_outlives_a_killed_launcher_and_the_same_command_is_accepted_at_once(
    arguments: list[str], tmp_path: Path, long: bool
) -> None:
    tries = LONG if long else SHORT
    for number in range(tries):
        with serve(*arguments, cwd=tmp_path) as served:
            run = run_of(tmp_path)
            async with agents(served.url):
                await next_version(run)
                await asyncio.sleep(SPREAD * number / tries)
                assert await left_of(served) == []


async def test_a_trainer_that_waits_for_a_stopped_engine_ends_too(
    arguments: list[str], tmp_path: Path
) -> None:
    """One of one process, and one of two: the same command is accepted again at once."""
    for processes in (1, 2):
        more = [f"train.processes={processes}", "train.micro_batch_tokens=128"]
        with serve(*arguments, *more, cwd=tmp_path) as served:
            run = run_of(tmp_path)
            async with agents(served.url):
                await next_version(run)
                (engine,) = [
                    p for p in served.children if "any_agent.engine.embedded" in p.cmdline()
                ]
                os.kill(engine.pid, signal.SIGSTOP)
                reached = newest(run)
                # The trainer cannot publish more than the version that it is sending.
                await asyncio.sleep(3)
                assert newest(run) <= reached + 1
                assert await left_of(served) == []
