"""The group of training processes, commanded by the leading one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint import load_checkpoint
from trainer.loss import LossConfig
from trainer.packing import Batch, Row, balanced, count_trained, idle_batch, micro_batches
from trainer.parallel.command_channel import CommandChannel, Leader
from trainer.policy import GradientNotFinite, Policy, PolicyConfig, StepResult
from trainer.world import World


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
                    batches_of(parts[0], token_budget, count),
                    total,
                    loss,
                    entropy=entropy,
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
        """Let the others save their shares of the optimizer's state; the body saves its own."""
        return self._leader.run({"do": "save", "folder": str(folder)})

    def stop(self) -> None:
        """Stop the others, if they can be reached."""
        self._leader.stop()


def batches_of(rows: Sequence[Row], token_budget: int, count: int) -> list[Batch]:
    """Return one process's micro-batches, and idle ones up to ``count``."""
    batches = micro_batches(rows, token_budget)
    return batches + [idle_batch() for _ in range(count - len(batches))]
