"""A script without a dataset trains on external agents: the same object, the same loop."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import pytest

from any_agent.client import RLClient
from tests.e2e.live_run import agent, live_config
from trainer import GRPOTrainer

pytestmark = pytest.mark.timeout(300)

STEPS = 2


async def work(url: str) -> None:
    """Sessions, some at once, until the service wants no more."""
    numbers, rng = iter(range(10**6)), random.Random(0)

    async def sessions(service: RLClient) -> None:
        while await agent(service, next(numbers), rng, 4, turns=2):
            pass

    async with RLClient(url, retry_for=60) as service, asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(sessions(service))


def test_it_trains_on_what_they_do(tmp_path: Path, tiny_model_dir: Path) -> None:
    settings = {
        "server.ranks": 1,
        "rollout.batch_size": 8,
        "rollout.max_concurrent": 16,
        "train.steps": STEPS,
    }
    said: list[str] = []
    with GRPOTrainer(live_config(tmp_path, tiny_model_dir, **settings), say=said.append) as trainer:
        agents = threading.Thread(target=lambda: asyncio.run(work(trainer.url)), daemon=True)
        agents.start()
        assert trainer.train()
        # They hear that the run has ended while the service is still there.
        agents.join(120)
        assert not agents.is_alive()
    assert [line.split()[1] for line in said if line.startswith("step")] == ["1/2", "2/2"]
    assert said[-1].startswith("trainer   done; checkpoints in ")
