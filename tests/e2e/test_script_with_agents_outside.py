"""A script without a dataset trains on external agents: the same object, the same loop."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path

from any_agent.client.rl_client import RLClient
from tests.support.e2e.counting_agent import AGENT, items
from tests.support.e2e.live_run import agent, live_config
from trainer import GRPOTrainer

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


def test_a_script_trains_on_what_agents_outside_of_it_do(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    settings = {
        "server.ranks": 1,
        "rollout.batch_size": 8,
        "rollout.max_concurrent": 16,
        "train.steps": STEPS,
        "eval.every": 1,
        "eval.temperature": 0,
    }
    said: list[str] = []
    config = live_config(tmp_path, tiny_model_dir, **settings)
    with GRPOTrainer(config, valid_dataset=items(2), say=said.append) as trainer:
        agents = threading.Thread(target=lambda: asyncio.run(work(trainer.url)), daemon=True)
        agents.start()
        assert trainer.train(eval_workflow=AGENT)
        # They hear that the run has ended while the service is still there.
        agents.join(300)
        assert not agents.is_alive()
    assert [line.split()[1] for line in said if line.startswith("step")] == ["1/2", "2/2"]
    # Between two steps the trainer runs an agent of its own, in eval sessions of the service.
    lines = [json.loads(line) for line in trainer.dir.metrics.read_text().splitlines()]
    evaluations = [line for line in lines if "eval" in line]
    assert [(line["step"], line["version"]) for line in evaluations] == [(1, 1), (2, 2)]
    assert all(line["eval"]["episodes"] == 2 for line in evaluations)
    # The steps' lines are said by the service's own thread.
    assert sum(line.startswith("trainer   done; checkpoints in ") for line in said) == 1
