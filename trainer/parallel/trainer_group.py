"""The group of training processes: how a process joins it, leads it, or follows its leader."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from any_agent.config import TrainConfig
from any_agent.errors import AnyAgentError
from trainer import sharded_optimizer
from trainer.checkpoint import load_checkpoint
from trainer.command_channel import CommandChannel, Leader
from trainer.from_config import policy_config, seed_all
from trainer.model import PolicyConfig
from trainer.policy import GradientNotFinite, Policy
from trainer.reference import SETTINGS, compare, frozen_logprobs, frozen_teacher, require_alike
from trainer.rows import Row
from trainer.world import World, follows, join, leave, require_processes, started_together

log = logging.getLogger(__name__)


def load_policy(
    source: str | Path,
    settings: PolicyConfig,
    leader: Leader | None,
    *,
    checkpoint: bool,
    base: str | None = None,
) -> tuple[Policy, dict[str, Any]]:
    """Load a model, or a checkpoint and its state, on all processes that ``leader`` commands.

    Each gets its share; without a leader it is this process alone. ``base`` is the model of a
    checkpoint's adapter.
    """
    command = {"do": "load", "source": str(source), "checkpoint": checkpoint, "base": base}
    if leader is None:
        return _load(command, settings, None)
    with leader.run(command):
        policy, state = _load(command, settings, leader.world)
    policy.leader = leader
    return policy, state


def _load(
    command: Mapping[str, Any], settings: PolicyConfig, world: World | None
) -> tuple[Policy, dict[str, Any]]:
    source = command["source"]
    if command["checkpoint"]:
        return load_checkpoint(Path(source), settings, world=world, base=command["base"])
    return Policy.load(source, settings, world), {}


def load_frozen(policy: Policy, role: str, path: str) -> None:
    """Load the policy's `reference` or `teacher`, on all processes that it leads.

    An earlier one is gone before. Raises as :func:`trainer.reference.frozen_logprobs`.
    """
    require_alike(SETTINGS[role], path, policy)
    base = policy.base is not None and policy.base.is_at(path)
    _set_frozen(policy, role, path, base=base)


def drop_frozen(policy: Policy, role: str) -> None:
    """Free the memory of the reference or the teacher, if any, on all processes that the policy
    leads."""
    if getattr(policy, role) is not None:
        _set_frozen(policy, role, "", base=False)


def _set_frozen(policy: Policy, role: str, path: str, *, base: bool) -> None:
    with policy.commanded({"do": "frozen", "role": role, "path": path, "base": base}):
        setattr(policy, role, None)
        if path and role == "teacher":
            policy.teacher = frozen_teacher(path, policy)
        elif path:
            policy.reference = frozen_logprobs(path, policy, base=base)


def join_processes(train: TrainConfig) -> World | None:
    """Meet the processes that torchrun started with this one; None if there are no others.

    Raises ConfigError if their number is not the configured one, StartupError if they do not come.
    """
    require_processes(train.processes)
    if started_together() == 1:
        return None
    if follows():
        # The leader gets the signal, ends the current step, and stops this process.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return join(policy_config(train).device)


def follow(world: World, train: TrainConfig) -> None:
    """Execute the leader's commands; return when the leader has ended."""
    Follower(world, policy_config(train), train).follow()
    leave()


@contextmanager
def lead(world: World | None) -> Iterator[Leader | None]:
    """Yield the leader of the other processes, None without any; stop them at the end."""
    if world is None:
        yield None
        return
    leader = Leader(world)
    try:
        yield leader
    finally:
        leader.stop()
        leave()


class Follower:
    """Follows the leader of its world.

    A failure while all processes exchange tensors ends this process, and with it all others, which
    would otherwise wait for it.
    """

    def __init__(self, world: World, settings: PolicyConfig, train: TrainConfig) -> None:
        self._world = world
        self._settings = settings
        self._train = train
        self._channel = CommandChannel(world)
        self.policy: Policy

    def follow(self) -> None:
        """Return when the leader sends `stop`; TrainingError when the leader is gone."""
        actions: dict[str, Callable[[Mapping[str, Any], list[Row]], object]] = {
            "nothing": lambda command, rows: None,
            "load": lambda command, rows: self._load(command),
            "frozen": lambda command, rows: _set_frozen(
                self.policy, command["role"], command["path"], base=command["base"]
            ),
            "step": self.step,
            "compare": lambda command, rows: compare(self.policy, command, rows),
            "gather": lambda command, rows: self.policy.gathered(command["names"]),
            "save": lambda command, rows: self.save(Path(command["folder"])),
        }
        while (message := self._channel.receive(0))[0]["do"] != "stop":
            command, rows = message
            reply: dict[str, Any] = {}
            try:
                actions[command["do"]](command, rows)
            except GradientNotFinite:
                pass
            except FloatingPointError as error:
                reply["not_finite"] = str(error)
            except (AnyAgentError, OSError) as error:
                if command["do"] != "save":
                    raise
                log.error("this process's share of the checkpoint cannot be saved: %s", error)
                reply["error"] = str(error)
            self._channel.send(0, reply)

    def _load(self, command: Mapping[str, Any]) -> None:
        seed_all(self._train.seed)
        self.policy, _ = _load(command, self._settings, self._world)

    def step(self, command: Mapping[str, Any], rows: Sequence[Row]) -> None:
        self.policy.step_commanded(command, rows)

    def save(self, folder: Path) -> None:
        sharded_optimizer.save_shard(self.policy, folder)
