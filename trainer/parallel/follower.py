"""A process that is led: it does what the leader says, until it is told to end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from any_agent.config import TrainConfig
from any_agent.errors import AnyAgentError
from trainer.checkpoint import load_checkpoint
from trainer.from_config import seed_all, set_optimizer
from trainer.loss import LossConfig
from trainer.parallel.command_channel import CommandChannel
from trainer.parallel.trainer_group import batches_of
from trainer.policy import GradientNotFinite, Policy, PolicyConfig
from trainer.world import World

log = logging.getLogger(__name__)


class Follower:
    """Follows the leader of its world. What fails here while all exchange tensors ends the process,
    and with it all others: they would wait for this one."""

    def __init__(self, world: World, settings: PolicyConfig, train: TrainConfig) -> None:
        self._world = world
        self._settings = settings
        self._train = train
        self._channel = CommandChannel(world)
        self.policy: Policy

    def follow(self) -> None:
        """Return when the leader has said so; TrainingError when it is gone."""
        does: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "nothing": lambda command: None,
            "load": self._load,
            "step": self._step,
            "gather": lambda command: self._gather(command["names"]),
            "save": lambda command: self._save(Path(command["folder"])),
        }
        while (command := self._channel.receive())["do"] != "stop":
            told: dict[str, Any] = {}
            try:
                does[command["do"]](command)
            except GradientNotFinite:
                pass
            except FloatingPointError as error:
                told["not_finite"] = str(error)
            except (AnyAgentError, OSError) as error:
                if command["do"] != "save":
                    raise
                log.error("%s", error)
                told["error"] = str(error)
            self._channel.answer(told)

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
            batches_of(self._channel.take(), command["budget"], command["batches"]),
            command["tokens"],
            LossConfig(**command["loss"]),
            entropy=command["entropy"],
        )

    def _save(self, folder: Path) -> None:
        from trainer.sharded_optimizer import save_shard

        save_shard(self.policy, folder)

    def _gather(self, names: list[str]) -> None:
        self.policy.gathered(names)
