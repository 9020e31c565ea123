"""Two processes train a live service's model; one of them is killed, and the run goes on exactly.

Real processes: the embedded engine, proxy, router, and a trainer of two.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import psutil

from any_agent.config import Config
from any_agent.launcher import Node, NodeOptions
from any_agent.rundir.layout import published_versions, weights_folder
from tests.support.e2e.history import consumed_in
from tests.support.e2e.live_run import drive, live_config, looked_after, steps_of
from trainer.checkpoint import load_checkpoint
from trainer.model import PolicyConfig
from trainer.weight_folders import holds_weights

STEPS = 5


def config_for(root: Path, model: Path) -> Config:
    settings = {
        "server.ranks": 1,
        "rollout.batch_size": 4,
        "rollout.max_concurrent": 8,
        "sessions.group_size": 2,
        "sampling.max_new_tokens": 12,
        "train.processes": 2,
        "train.steps": STEPS,
        "train.checkpoint_every": 3,
        "train.micro_batch_tokens": 128,
    }
    return live_config(root, model, **settings)


class KillingNode(Node):
    """A service, one of whose training processes is killed after the first step."""

    killed: int | None = None

    def check(self) -> bool:
        trainer = self.parts.get("trainer")
        if self.killed is None and trainer is not None and steps_of(self.dir):
            for process in psutil.Process(trainer.pid).children():
                if process.environ().get("RANK") == "1":
                    self.killed = process.pid
                    process.kill()
        return super().check()


async def watched(node: Node) -> None:
    """Agents until training has ended, and parts that die started again meanwhile."""
    async with looked_after(node):
        await drive(node, agents=8)


def test_training_by_two_processes_goes_on_when_one_is_killed(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = config_for(tmp_path, tiny_model_dir)
    said: list[str] = []
    with KillingNode(config, NodeOptions(say=said.append)) as node:
        asyncio.run(watched(node))
        assert node.killed is not None
        assert node.parts["trainer"].restarts == 1, said

    run, lines = node.dir, steps_of(node.dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    checkpoint = run.checkpoints / f"step-{STEPS:08d}"
    assert len(list((checkpoint / "trainer").glob("optimizer*.safetensors"))) == 2
    policy, state = load_checkpoint(checkpoint, PolicyConfig(threads=1))
    newest = max(published_versions(run.weights))
    assert state["version"] == newest
    assert holds_weights(weights_folder(run.weights, newest), policy)
    # Every session had one effect, and each step the sessions that it told of.
    taken = Counter(one.step for one in consumed_in(checkpoint).values() if one.rejected is None)
    assert taken == {line["step"]: line["sessions"] for line in lines}
