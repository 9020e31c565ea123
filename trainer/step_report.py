"""What is told of a step: its line of `metrics.jsonl`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from any_agent import stats_tracker
from trainer.batch import TrainingBatch
from trainer.batch_source import BatchSource
from trainer.policy import StepResult


def step_line(
    step: int,
    version: int,
    batch: TrainingBatch,
    result: StepResult,
    source: BatchSource,
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """As plain data; what workflows recorded since the last one is in it, and forgotten then."""
    now = source.capacity
    return {
        "time": time.time(),
        "step": step,
        "version": version,
        "reward": sum(batch.scores) / max(1, len(batch.scores)),
        "sessions": len(batch.trained),
        "left_out": dict(Counter(batch.rejected.values())),
        "rejected": dict(source.rejected),
        "interactions": len(batch.rows),
        "staleness_mean": sum(batch.ages) / max(1, len(batch.ages)),
        "staleness_max": max(batch.ages, default=0),
        "grad_norm": result.grad_norm,
        **result.stats.means(),
        "seconds": {phase: round(value, 4) for phase, value in seconds.items()},
        "capacity": now.model_dump() if now else None,
        "epoch": source.epoch,
        "stats": {
            name: value
            for name, value in stats_tracker.export_all().items()
            if not name.endswith("__count")
        },
    }


def describe_step(line: Mapping[str, Any]) -> str:
    """The line for a log."""
    return (
        f"step {line['step']}: reward {line['reward']:.3f}, {line['sessions']} sessions, "
        f"{line['tokens']} tokens, staleness {line['staleness_mean']:.2f}, "
        f"version {line['version']}"
    )
