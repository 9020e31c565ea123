"""The role of a training process, by how it was started: alone, leader or follower.

Followers execute the leader's commands, until it stops them.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from any_agent.config import TrainConfig
from any_agent.errors import AnyAgentError
from trainer.checkpoint import load_checkpoint
from trainer.from_config import policy_config, seed_all, set_optimizer
from trainer.loss import LossConfig
from trainer.parallel.command_channel import CommandChannel
from trainer.parallel.trainer_group import TrainerGroup, batches_of
from trainer.policy import GradientNotFinite, Policy, PolicyConfig
from trainer.world import World, follows, join, leave, require_processes, started_together

log = logging.getLogger(__name__)


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
def lead(world: World | None) -> Iterator[TrainerGroup | None]:
    """Yield the group that this process leads, None without other processes; stop it at the end."""
    if world is None:
        yield None
        return
    group = TrainerGroup(world)
    try:
        yield group
    finally:
        group.stop()
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
        actions: dict[str, Callable[[Mapping[str, Any]], object]] = {
            "nothing": lambda command: None,
            "load": self._load,
            "step": self._step,
            "gather": lambda command: self.policy.gathered(command["names"]),
            "save": lambda command: self._save(Path(command["folder"])),
        }
        while (command := self._channel.receive_command())["do"] != "stop":
            reply: dict[str, Any] = {}
            try:
                actions[command["do"]](command)
            except GradientNotFinite:
                pass
            except FloatingPointError as error:
                reply["not_finite"] = str(error)
            except (AnyAgentError, OSError) as error:
                if command["do"] != "save":
                    raise
                log.error("this process's share of the checkpoint cannot be saved: %s", error)
                reply["error"] = str(error)
            self._channel.reply(reply)

    def _load(self, command: Mapping[str, Any]) -> None:
        seed_all(self._train.seed)
        if command["checkpoint"]:
            self.policy, _ = load_checkpoint(
                Path(command["source"]), self._settings, world=self._world
            )
            set_optimizer(self.policy, self._train)
        else:
            self.policy = Policy.load(command["source"], self._settings, self._world)

    def _step(self, command: Mapping[str, Any]) -> None:
        self.policy.step(
            batches_of(self._channel.receive_rows(), command["budget"], command["batches"]),
            command["tokens"],
            LossConfig(**command["loss"]),
            entropy=command["entropy"],
        )

    def _save(self, folder: Path) -> None:
        from trainer.sharded_optimizer import save_shard

        save_shard(self.policy, folder)
