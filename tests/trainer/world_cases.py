"""What processes that train together do in the tests; each function runs in all of them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from episode_lab import pair
from loop_lab import Lab, config_of, outcome
from torch import Tensor
from trainer_lab import VOCAB, random_rows

from any_agent.config import TrainConfig
from any_agent.demo.model import make_model
from any_agent.errors import TrainingError
from trainer.checkpoint import save_checkpoint
from trainer.loss import LossConfig
from trainer.packing import count_trained, micro_batches
from trainer.parallel.balance import balanced
from trainer.parallel.control import Channel, Leader
from trainer.parallel.crew import Crew, batches_of
from trainer.parallel.following import Follower
from trainer.parallel.sharding import whole_tensor
from trainer.parallel.world import World
from trainer.policy import Policy, PolicyConfig
from trainer.settings import policy_config

CONFIG = PolicyConfig(lr=1e-3, threads=1)
TRAIN = TrainConfig(lr=1e-3)

Found = tuple[float, dict[str, Tensor]]


def divided_policy(world: World, dtype: torch.dtype = torch.float64, **config: Any) -> Policy:
    """As `small_policy`, its weights divided."""
    torch.set_num_threads(1)
    model = make_model(VOCAB, 0, hidden_size=32, layers=2, context=256)
    return Policy(model.to(dtype), PolicyConfig(**config), world)


def split(case: int) -> tuple[list[Any], int]:
    """Some rows, and a token budget for a pass."""
    chance = random.Random(case)
    rows = random_rows(case, chance.randint(1, 12), longest=chance.choice([6, 24, 60]))
    return rows, chance.choice([1, 24, 70, 10_000])


def gradients_of(world: World, cases: int, config: dict[str, Any]) -> list[Found]:
    """Loss and whole gradients of each case's rows."""
    policy = divided_policy(world, **config)
    return [_gradient(world, policy, case) for case in range(cases)]


def _gradient(world: World, policy: Policy, case: int) -> Found:
    rows, budget = split(case)
    parts = balanced(rows, world.size)
    count = max(len(micro_batches(part, budget)) for part in parts)
    policy.optimizer.zero_grad(set_to_none=True)
    stats = policy.accumulate(
        batches_of(parts[world.rank], budget, count), count_trained(rows), LossConfig()
    )
    found = {n: whole_tensor(p.grad, world.device) for n, p in policy.model.named_parameters()}
    return stats.loss, found if world.leads else {}


def led(world: World, case: Callable[..., Any], *arguments: Any) -> Any:
    """``case(crew, *arguments)`` on the leader, while the others follow it."""
    torch.set_num_threads(1)
    if not world.leads:
        Follower(world, CONFIG, TRAIN).follow()
        return None
    crew = Crew(world)
    try:
        return case(crew, *arguments)
    finally:
        crew.stop()


def trained(crew: Crew, model: str, seeds: range, root: str) -> dict[str, Tensor]:
    """Steps from a model, and a checkpoint of them; all that it holds."""
    policy = crew.load(model, CONFIG)
    for seed in seeds:
        policy.train(random_rows(seed, dtype=torch.float32), 60)
    save_checkpoint(Path(root), policy, Path(model), {"seen": policy.steps})
    return weights_of(policy)


def saved_again(crew: Crew, checkpoint: str, root: str) -> dict[str, Tensor]:
    """A checkpoint loaded and written again, and what was loaded."""
    policy, state = crew.load_checkpoint(Path(checkpoint), CONFIG)
    save_checkpoint(Path(root), policy, Path(checkpoint), state)
    return weights_of(policy)


def gone_on(crew: Crew, checkpoint: str, seeds: range) -> dict[str, Tensor]:
    policy, _ = crew.load_checkpoint(Path(checkpoint), CONFIG)
    for seed in seeds:
        policy.train(random_rows(seed, dtype=torch.float32), 60)
    return weights_of(policy)


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: t.clone() for bucket in policy.buckets(3000) for name, t in bucket}


def buckets_left_early(crew: Crew, model: str) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Weights, the names of a few buckets that were not all asked for, and a step after that."""
    policy = crew.load(model, CONFIG)
    some = []
    for bucket in policy.buckets(3000):
        some.append([name for name, _ in bucket])
        if len(some) == 2:
            break
    policy.train(random_rows(0, dtype=torch.float32), 60)
    return weights_of(policy), some


def not_finite(crew: Crew, model: str, broken: int) -> tuple[str, bool, int]:
    """What is said of a row with a behaviour that is not a number, whether nothing was changed, and
    the steps made after a good one."""
    policy = crew.load(model, CONFIG)
    before = weights_of(policy)
    rows = random_rows(3, 6, dtype=torch.float32)
    rows[broken]["logprobs"][-1] = float("nan")
    said = ""
    try:
        policy.train(rows, 60)
    except FloatingPointError as error:
        said = str(error)
    after = weights_of(policy)
    same = all(torch.equal(before[name], t) for name, t in after.items())
    policy.train(random_rows(4, dtype=torch.float32), 60)
    return said, same, policy.steps


def killed(world: World) -> tuple[str, str]:
    """What the leader is told, in the middle of something and while it waits, when another process
    is gone."""
    channel = Channel(world)
    if not world.leads:
        while channel.receive()["do"] != "die":
            channel.answer({})
        os._exit(1)
    told: Queue[BaseException] = Queue()
    leader = Leader(channel, every=0.05)
    leader.lost = told.put
    said = "nothing"
    try:
        with leader.doing({"do": "die"}):
            pass
    except TrainingError as error:
        said = error.message
    return said, str(told.get(timeout=120))


def run(
    world: World, settings: list[str], first: int, dies: int | None = None
) -> dict[str, Any] | None:
    """A whole run on episodes from ``first`` on, and what the leader's last checkpoint holds.

    ``dies``: the step in whose middle the last process is killed.
    """
    config = config_of(settings)
    torch.set_num_threads(1)
    if not world.leads:
        Dying(world, policy_config(config.train), config.train, dies).follow()
        return None
    episodes = [pair(f"p{k}", turns=1 + k % 3) for k in range(config.train.steps)]
    crew = Crew(world)
    lab = Lab(config, episodes[first:], crew=crew)
    lab.executor.journal |= {t.session_id: t for episode in episodes for t in episode}
    assert lab.trainer.train()
    crew.stop()
    return outcome(lab) | {"steps": [line["step"] for line in lab.metrics]}


class Dying(Follower):
    """Killed when it is about to make this step."""

    def __init__(self, world: World, settings: PolicyConfig, train: TrainConfig, step: int | None):
        super().__init__(world, settings, train)
        self._dies = step

    def _step(self, command: Any) -> None:
        if self.policy.steps + 1 == self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._step(command)


def refused(crew: Crew, model: str) -> tuple[str, int]:
    """What the leader is told of a folder that another process cannot write into, and the steps
    made after that, too."""
    policy = crew.load(model, CONFIG)
    policy.train(random_rows(0, dtype=torch.float32), 60)
    said = ""
    try:
        with crew.saving(Path(model) / "tokenizer.json"):
            pass
    except TrainingError as error:
        said = error.message
    policy.train(random_rows(1, dtype=torch.float32), 60)
    return said, policy.steps
