"""A loop that is fed by a workflow on a dataset, without engines: what it samples is made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from any_agent.config import Config
from any_agent.rollout import WorkflowExecutor
from any_agent.workflow import RolloutWorkflow, context
from tests.support.trainer.loop import Lab
from trainer.batch_source import DatasetBatches


class Alternating(RolloutWorkflow):
    """Every second run of an item is rewarded; what is sampled tells the item and which it was."""

    def __init__(
        self,
        *,
        dull: Container[int] = (),
        failing: Container[int] = (),
        rejected: Container[int] = (),
        halved: bool = False,
    ) -> None:
        """``rejected``: items of which each run gives None; ``halved``: every second run does."""
        self.runs: Counter[int] = Counter()
        """By item."""
        self._dull = dull
        self._failing = failing
        self._rejected = rejected
        self._halved = halved

    async def arun_episode(
        self, engine: Any, data: dict[str, Any]
    ) -> dict[str, torch.Tensor] | None:
        n = data["n"]
        turn = self.runs[n] % 2
        self.runs[n] += 1
        if n in self._failing:
            raise RuntimeError(f"item {n} fails")
        if n in self._rejected or (self._halved and turn):
            return None
        reward = 0.5 if n in self._dull else float(turn)
        version = context.get().version
        return {
            "input_ids": torch.tensor([[5, 6, n, 8, 9 + turn]], dtype=torch.int32),
            "loss_mask": torch.tensor([[0, 0, 0, 1, 1]], dtype=torch.int32),
            "logprobs": torch.tensor([[0, 0, 0, -3, -3]], dtype=torch.float32),
            "versions": torch.tensor([[-1, -1, -1, version, version]], dtype=torch.int32),
            "attention_mask": torch.ones(1, 5, dtype=torch.bool),
            "rewards": torch.tensor([reward], dtype=torch.float32),
        }


class DataLab(Lab):
    """One start of such a run; ``before``: the start whose folder and ranks these are."""

    def __init__(
        self,
        config: Config,
        workflow: RolloutWorkflow | None = None,
        *,
        items: int = 10,
        rows: Sequence[Any] = (),
        before: Lab | None = None,
        accept: Callable[[Any], bool] | None = None,
    ) -> None:
        super().__init__(config, [], before=before)
        self.workflow = workflow or Alternating()
        self.source = DatasetBatches(
            config,
            rows or [{"n": n} for n in range(items)],
            self.workflow,
            accept,
            WorkflowExecutor(None, config.rollout),
        )
        self.trainer.source = self.source
        self.trainer.publisher.updating = self.source.updating

    @property
    def runs(self) -> Counter[int]:
        """How often each item was run."""
        assert isinstance(self.workflow, Alternating)
        return self.workflow.runs

    @property
    def left(self) -> Mapping[str, Any]:
        """What is done with."""
        return self.source.state()
