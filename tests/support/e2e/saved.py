"""What a run saved, and whether another run saved the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file

from any_agent.rollout import Consumed
from any_agent.rundir.layout import RunDir, read_json
from tests.support.e2e.history import consumed_in


@dataclass(frozen=True, slots=True)
class Saved:
    """What a run came to, but for the numbers of its weight versions."""

    tensors: Mapping[str, torch.Tensor]
    """Weights, optimizer's moments and generators of the last checkpoint."""
    rewards: list[tuple[int, float, int]]
    """Step, reward and sessions of every line of metrics.jsonl."""
    consumed: Mapping[str, Consumed]
    dataset: Mapping[str, Any] | None
    """What of it is done with."""


def saved(run: RunDir, steps: int) -> Saved:
    """Return what a run of so many steps came to."""
    checkpoint = run.checkpoints / (run.checkpoints / "latest").read_text().strip()
    assert checkpoint.name == f"step-{steps:08d}"
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert {line["staleness_max"] for line in lines} == {0}, "with eta 0 everything is on-policy"
    return Saved(
        tensors={
            f"{path.relative_to(checkpoint)}:{name}": tensor
            for path in sorted(checkpoint.rglob("*.safetensors"))
            for name, tensor in load_file(path).items()
        },
        rewards=[(line["step"], line["reward"], line["sessions"]) for line in lines],
        consumed=consumed_in(checkpoint),
        dataset=read_json(checkpoint / "trainer" / "state.json")["state"].get("dataset"),
    )


def assert_same(again: Saved, expected: Saved, *, sessions: bool = True) -> None:
    """Weights, optimizer and generators bit for bit, rewards, the dataset's place, sessions."""
    if sessions:
        assert again.consumed == expected.consumed
    assert again.rewards == expected.rewards
    assert again.dataset == expected.dataset
    assert different(again.tensors, expected.tensors) == []


def different(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the tensors that are not the same bit for bit."""
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
