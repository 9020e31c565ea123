"""The group of training processes: the leader commands it, and the followers execute."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from any_agent.config import TrainConfig
from any_agent.errors import AnyAgentError
from trainer.checkpoint import load_checkpoint
from trainer.from_config import policy_config, seed_all, set_optimizer
from trainer.loss import LossConfig
from trainer.packing import Batch, Row, balanced, count_trained, idle_batch, micro_batches
from trainer.parallel.command_channel import CommandChannel, Leader
from trainer.policy import GradientNotFinite, Policy, PolicyConfig, StepResult
from trainer.world import World, follows, join, leave, require_processes, started_together


class TrainerGroup:
    """The group as rank 0 commands it: each method runs on all processes, this one included."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._leader = Leader(CommandChannel(world))

    def when_lost(self, callback: Callable[[BaseException], None]) -> None:
        """Call ``callback``, in another thread, when a process is gone while all are idle."""
        self._leader.lost = callback

    def load(self, source: str | Path, settings: PolicyConfig) -> Policy:
        """Run :meth:`Policy.load` on all processes; each gets its share."""
        with self._leader.run({"do": "load", "source": str(source), "checkpoint": False}):
            policy = Policy.load(source, settings, self.world)
        policy.group = self
        return policy

    def load_checkpoint(self, path: Path, settings: PolicyConfig) -> tuple[Policy, dict[str, Any]]:
        """Run :func:`trainer.checkpoint.load_checkpoint` on all processes."""
        with self._leader.run({"do": "load", "source": str(path), "checkpoint": True}):
            policy, state = load_checkpoint(path, settings, world=self.world)
        policy.group = self
        return policy, state

    def train(
        self,
        policy: Policy,
        rows: Sequence[Row],
        token_budget: int,
        loss: LossConfig,
        entropy: bool,
    ) -> StepResult:
        """Make one step, each process on its part of the rows; see :meth:`Policy.step`."""
        total = count_trained(rows)
        if not total:
            # Checked before the others get the command: their step would fail and end them.
            raise ValueError("there is nothing to train on")
        parts = balanced(rows, self.world.size)
        count = max(len(micro_batches(part, token_budget)) for part in parts)
        command = {
            "do": "step",
            "batches": count,
            "budget": token_budget,
            "tokens": total,
            "loss": asdict(loss),
            "entropy": entropy,
        }
        found: list[str] = []
        try:
            with self._leader.run(command, parts) as found:
                return policy.step(
                    batches_of(parts[0], token_budget, count), total, loss, entropy=entropy
                )
        except GradientNotFinite:
            if found:
                raise FloatingPointError(found[0]) from None
            raise

    def gather(self, policy: Policy, names: list[str]) -> list[Tensor]:
        """Return these tensors of the model, whole, on this process."""
        with self._leader.run({"do": "gather", "names": names}):
            return policy.gathered(names)

    def saving(self, folder: Path) -> AbstractContextManager[object]:
        """Let the others save their shares of the optimizer's state, and the body this one's."""
        return self._leader.run({"do": "save", "folder": str(folder)})

    def stop(self) -> None:
        """Stop the others, if they can be reached."""
        self._leader.stop()


def batches_of(rows: Sequence[Row], token_budget: int, count: int) -> list[Batch]:
    """Return one process's micro-batches, and idle ones up to ``count``."""
    batches = micro_batches(rows, token_budget)
    return batches + [idle_batch() for _ in range(count - len(batches))]


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
