"""What processes that train together do in the tests; each function runs in all of them."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import trainer.sharded_optimizer
from any_agent.config import TrainConfig
from any_agent.errors import TrainingError
from any_agent.runtime.disk_space import DiskSpace
from tests.support.trainer.adapters import LORA, row_logprobs, stirred, train, weights_of
from tests.support.trainer.episodes import pair
from tests.support.trainer.loop import Lab, config_of, outcome
from tests.support.trainer.policies import other_model, random_rows, small_policy, teach
from tests.support.trainer.trees import tree_rows
from tests.support.trainer.updates import SEQUENCE_LEVEL
from trainer.checkpoint import complete_checkpoints, save_checkpoint
from trainer.command_channel import CommandChannel, Leader
from trainer.from_config import policy_config
from trainer.lora import adapter_tensors, switched_off
from trainer.loss import LossConfig, LossStats
from trainer.model import PolicyConfig
from trainer.parallel.trainer_group import Follower, drop_frozen, load_frozen, load_policy
from trainer.policy import Policy
from trainer.reference import reference_logprobs
from trainer.rows import Row, count_trained
from trainer.updates import Minibatch, StepConfig, divide
from trainer.world import World, whole_tensor

CONFIG = PolicyConfig(lr=1e-3, threads=1)
LORA_CONFIG = replace(CONFIG, lora=LORA)
TRAIN = TrainConfig(lr=1e-3)

Weights = dict[str, Tensor]
Found = tuple[float, Weights]


def split(case: int) -> tuple[list[Any], int]:
    """Some rows, in every other case with shared prefixes, and a token budget for a pass."""
    chance = random.Random(case)
    if case % 2:
        return tree_rows(case), chance.choice([1, 9, 24, 10_000])
    rows = random_rows(case, chance.randint(1, 12), longest=chance.choice([6, 24, 60]))
    return rows, chance.choice([1, 24, 70, 10_000])


def gradients_of(world: World, cases: int) -> list[Found]:
    """Loss and whole gradients of each case's rows."""
    policy = small_policy(world=world)
    return [_gradient(world, policy, case) for case in range(cases)]


def distilled(world: World, cases: int, config: LossConfig) -> list[Found]:
    """The same, with a teacher that is divided, too."""
    policy = small_policy(world=world, head_chunk=7)
    teach(policy, other_model())
    return [_gradient(world, policy, case, config) for case in range(cases)]


def under(
    world: World, master: torch.dtype, configs: list[dict[str, Any]]
) -> list[tuple[Found, dict[str, Tensor]]]:
    """With each of these configurations: a loss and its gradients, and the weights after two
    steps."""
    out = []
    for config in configs:
        model = small_policy(dtype=master).model
        policy = Policy(model, PolicyConfig(lr=1e-3, **config), world)
        found = _gradient(world, policy, 0)
        for case in range(2):
            policy.step([_share(world, policy, case)], split(case)[1])
        out.append((found, weights_of(policy)))
    return out


def _share(world: World, policy: Policy, case: int) -> Minibatch:
    """This process's part of the case's rows."""
    return _part(world, policy, *split(case))


def _part(world: World, policy: Policy, rows: list[Row], budget: int) -> Minibatch:
    parts, shapes = policy.runner.shares(rows, world.size, budget)
    return Minibatch(parts[world.rank], count_trained(rows), shapes)


def _accumulated(
    world: World, policy: Policy, case: int, config: LossConfig | None = None
) -> LossStats:
    one = _share(world, policy, case)
    passes = policy.runner.plan(one.rows, split(case)[1], one.shapes)
    policy.optimizer.zero_grad(set_to_none=True)
    return policy.accumulate(passes, one.tokens, config or LossConfig())


def _gradient(world: World, policy: Policy, case: int, config: LossConfig | None = None) -> Found:
    stats = _accumulated(world, policy, case, config)
    found = {n: whole_tensor(p.grad, world.device) for n, p in policy.model.named_parameters()}
    return stats.loss, found if world.leads else {}


def adapters_of(
    world: World, configs: list[dict[str, Any]], cases: int
) -> list[tuple[list[Found], Tensor, dict[str, Tensor]]]:
    """With each of these configurations, of an adapter that is not zero: the loss and the
    gradients of each case's rows, the log-probabilities of the first rows without the adapter, and
    what is published."""
    out = []
    for config in configs:
        policy = stirred(small_policy(world=world, lora=LORA, **config))
        adapter = adapter_tensors(policy.model)
        found = []
        for case in range(cases):
            stats = _accumulated(world, policy, case)
            assert {n for n, p in policy.model.named_parameters() if p.grad is not None} <= (
                adapter.keys()
            )
            whole = {n: whole_tensor(p.grad, world.device) for n, p in adapter.items()}
            found.append((stats.loss, whole if world.leads else {}))
        with switched_off(policy.model):
            bare = torch.cat([row_logprobs(policy, [row])[0] for row in split(0)[0]])
        out.append((found, bare, weights_of(policy)))
    return out


def updated(world: World, cases: int, config: LossConfig) -> list[tuple[LossStats, Weights]]:
    """Return each case's statistics of a step of several updates, and the weights after it."""
    out = []
    for case in range(cases):
        policy, frozen = (small_policy(world=world, lr=1e-3) for _ in range(2))
        policy.reference = frozen.runner.logprobs
        rows, parts, budget = divided_case(case)
        work = [_part(world, policy, [rows[k] for k in part], budget) for part in parts]
        result = policy.step(work, budget, config, StepConfig(2))
        out.append((result.stats, weights_of(policy)))
    return out


def divided_case(case: int) -> tuple[list[Row], list[list[int]], int]:
    """Rows, their minibatches, and a budget, as :func:`split`."""
    rows, budget = split(case)
    owners = [(k % 3, f"s{k % 5}") for k in range(len(rows))]
    return rows, divide(rows, owners, 2), budget


def commanded(
    leader: Leader, config: PolicyConfig, model: str, broken: int | None
) -> tuple[Weights, str]:
    """The weights after two commanded steps of several updates beside a reference model, and what
    is said of one in between whose second minibatch has a ``broken`` row."""
    policy, _ = load_policy(model, config, leader, checkpoint=False)
    load_frozen(policy, "reference", model)
    drop_frozen(policy, "reference")
    load_frozen(policy, "reference", model)
    parts, settings = [[0, 2, 4], [1, 3, 5]], StepConfig(2, lr=2e-3)
    said = ""
    policy.train(random_rows(0, dtype=torch.float32), 60, SEQUENCE_LEVEL, settings, parts)
    if broken is not None:
        bad = random_rows(1, dtype=torch.float32)
        bad[parts[1][broken]]["advantages"] = torch.tensor(float("nan"))
        try:
            policy.train(bad, 60, LossConfig(kl_coef=0.1), settings, parts)
        except FloatingPointError as error:
            said = str(error)
    assert policy.steps == 1
    policy.train(random_rows(2, dtype=torch.float32), 60, SEQUENCE_LEVEL, settings, parts)
    assert policy.steps == 2
    return weights_of(policy), said


def compared(leader: Leader, config: PolicyConfig, model: str, seeds: range) -> list[list[Tensor]]:
    """The log-probabilities of a reference model that the policy has moved away from."""
    policy, _ = load_policy(model, config, leader, checkpoint=False)
    load_frozen(policy, "reference", model)
    policy.train(random_rows(9, dtype=torch.float32), 60)
    return [
        reference_logprobs(policy, random_rows(seed, dtype=torch.float32), 40) for seed in seeds
    ]


def distilled_steps(
    leader: Leader, config: PolicyConfig, model: str, teacher: str, loss: LossConfig
) -> Weights:
    """The weights after commanded steps beside a teacher and a reference model."""
    policy, _ = load_policy(model, config, leader, checkpoint=False)
    load_frozen(policy, "reference", model)
    load_frozen(policy, "teacher", teacher)
    for seed in range(2):
        policy.train(random_rows(seed, dtype=torch.float32), 60, loss, StepConfig(2))
    return weights_of(policy)


def led(world: World, config: PolicyConfig, case: Callable[..., Any], *arguments: Any) -> Any:
    """``case(leader, config, *arguments)`` on the leader, while the others follow it."""
    torch.set_num_threads(1)
    if not world.leads:
        Follower(world, config, TRAIN).follow()
        return None
    leader = Leader(world)
    try:
        return case(leader, config, *arguments)
    finally:
        leader.stop()


def trained(leader: Leader, config: PolicyConfig, model: str, seeds: range, root: str) -> Weights:
    """Steps from a model, and a checkpoint of them; all that it holds."""
    policy, _ = load_policy(model, config, leader, checkpoint=False)
    train(policy, seeds)
    save_checkpoint(Path(root), policy, Path(model), {"seen": policy.steps})
    return weights_of(policy)


def saved_again(leader: Leader, config: PolicyConfig, checkpoint: str, root: str) -> Weights:
    """A checkpoint loaded and written again, and what was loaded."""
    policy, state = load_policy(checkpoint, config, leader, checkpoint=True)
    save_checkpoint(Path(root), policy, Path(checkpoint), state)
    return weights_of(policy)


def gone_on(leader: Leader, config: PolicyConfig, checkpoint: str, seeds: range) -> Weights:
    policy, _ = load_policy(checkpoint, config, leader, checkpoint=True)
    train(policy, seeds)
    return weights_of(policy)


def buckets_left_early(
    leader: Leader, config: PolicyConfig, model: str
) -> tuple[Weights, list[list[str]]]:
    """Weights, the names of a few buckets that were not all asked for, and a step after that."""
    policy, _ = load_policy(model, config, leader, checkpoint=False)
    some = []
    for bucket in policy.buckets(3000):
        some.append([name for name, _ in bucket])
        if len(some) == 2:
            break
    policy.train(random_rows(0, dtype=torch.float32), 60)
    return weights_of(policy), some


def killed(world: World) -> tuple[str, str]:
    """What the leader is told, in the middle of something and while it waits, when another process
    is gone."""
    if not world.leads:
        channel = CommandChannel(world)
        while channel.receive(0)[0]["do"] != "die":
            channel.send(0, {})
        os._exit(1)
    told: Queue[BaseException] = Queue()
    leader = Leader(world, heartbeat=0.05)
    leader.lost = told.put
    said = "nothing"
    try:
        with leader.run({"do": "die"}):
            pass
    except TrainingError as error:
        said = error.message
    return said, str(told.get(timeout=120))


def run(
    world: World,
    settings: list[str],
    first: int,
    dies: int | None = None,
    stops: int | None = None,
) -> dict[str, Any] | None:
    """A whole run on episodes from ``first`` on, and what the leader's last checkpoint holds.

    ``dies``: the step in whose middle the last process is killed; ``stops``: the one in whose
    middle all get SIGTERM.
    """
    config = config_of(settings)
    torch.set_num_threads(1)
    if not world.leads:
        Dying(world, policy_config(config.train), config.train, dies, stops).follow()
        return None
    episodes = [pair(f"p{k}", turns=1 + k % 3) for k in range(config.train.steps)]
    crew = Told(world)
    crew.stops = stops
    lab = Lab(config, episodes[first:], leader=crew)
    lab.executor.journal |= {t.session_id: t for episode in episodes for t in episode}
    signal.signal(signal.SIGTERM, lambda *_: lab.trainer.stop())
    assert lab.trainer.train() == (stops is None)
    crew.stop()
    return outcome(lab) | {"steps": [line["step"] for line in lab.metrics]}


class Told(Leader):
    """Its process gets SIGTERM when it is about to lead this step."""

    stops: int | None = None

    made = 0

    def run(self, command: Mapping[str, Any], rows: Any = None) -> Any:
        if command["do"] == "step":
            self.made += 1
            if self.made == self.stops:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().run(command, rows)


class Dying(Follower):
    """Killed, or told to end, which is its leader's affair, when it is about to make this step."""

    def __init__(
        self,
        world: World,
        settings: PolicyConfig,
        train: TrainConfig,
        dies: int | None,
        stops: int | None,
    ) -> None:
        super().__init__(world, settings, train)
        self._dies, self._stops = dies, stops
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def step(self, command: Any, rows: Any) -> None:
        step = self.policy.steps + 1
        if step == self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self._stops:
            os.kill(os.getpid(), signal.SIGTERM)
        super().step(command, rows)


def waiting(world: World, model: str, root: str) -> tuple[list[int], float] | None:
    """The checkpoints, and a later loss, where the disk is full for one process, then another."""
    torch.set_num_threads(1)
    calls, fails, real = count(), int(world.leads), trainer.sharded_optimizer.save_shard

    def save_shard(policy: Policy, folder: Path) -> None:
        if next(calls) == fails:
            raise TrainingError("the share cannot be written: [Errno 28] No space left on device")
        real(policy, folder)

    trainer.sharded_optimizer.save_shard = save_shard
    if not world.leads:
        Follower(world, CONFIG, TRAIN).follow()
        return None
    leader = Leader(world)
    policy, _ = load_policy(model, CONFIG, leader, checkpoint=False)
    policy.train(random_rows(0, dtype=torch.float32), 60)
    with suppress(ValueError):  # and the other process lives
        policy.train([], 60)
        raise AssertionError("there is nothing to train on")
    tries = []

    def save() -> Path:
        assert list(complete_checkpoints(Path(root))) == [], "nothing half is kept"
        tries.append(1)
        return save_checkpoint(Path(root), policy, Path(model), {})

    DiskSpace().write(save, Path(root), "the checkpoint")
    assert len(tries) == 3
    loss = policy.train(random_rows(1, dtype=torch.float32), 60).stats.loss
    leader.stop()
    return list(complete_checkpoints(Path(root))), loss


def silent(world: World) -> str:
    """What the others are told where the process of rank 1 hangs."""
    dist.barrier()
    world = replace(world, timeout=20.0)
    if world.rank == 1:
        CommandChannel(world)
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        if world.leads:
            with Leader(world).run({"do": "nothing"}):
                pass
        else:
            Follower(world, CONFIG, TRAIN).follow()
    except TrainingError as error:
        return error.message
    return "nothing"
