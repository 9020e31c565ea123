"""States and a report of a demo that nobody ran."""

from __future__ import annotations

from typing import Any

from any_agent.demo.demo import part_names
from any_agent.demo.report import Report
from any_agent.demo.state import DemoState, Measures, PartState, Step

BEFORE = Measures(accuracy=0.358, reward=0.612, turns=1.64, tokens=2.1)
AFTER = Measures(accuracy=0.958, reward=0.981, turns=1.04, tokens=2.0)


def step(number: int, **changes: Any) -> Step:
    """A step's line of `metrics.jsonl`, with what the trainer writes besides."""
    return {
        "time": 1.0,
        "step": number,
        "version": number,
        "reward": 0.5,
        "sessions": 64,
        "left_out": {"stale": 1},
        "rejected": {"no_variance": 8 * number},
        "staleness_mean": 0.25,
        "grad_norm": 1.0,
        "seconds": {"wait": 1.0, "forward": 0.2, "backward": 0.3, "sync": 0.1},
    } | changes


def fresh(ranks: int = 2) -> DemoState:
    """Before anything was started."""
    parts = tuple(PartState(name) for name in part_names(ranks))
    return DemoState(seed=0, steps=25, folder="/tmp/demo", parts=parts, prompts=240)


def busy() -> DemoState:
    """In the middle of training; a rank is being started again."""
    parts = {name: PartState(name, "ready") for name in part_names(2)}
    parts["rank-1"] = PartState("rank-1", "restarting", 2)
    return DemoState(
        seed=3,
        steps=25,
        folder="/tmp/demo",
        phase="training",
        elapsed=65.4,
        url="http://127.0.0.1:41235",
        parts=tuple(parts.values()),
        history=tuple(step(k, reward=k / 20) for k in range(1, 13)),
        sessions={"open": 32, "finalized": 40, "leased": 17, "trained": 768, "rejected": 108},
        tokens_per_second=312.4,
        prompts=240,
        before=BEFORE,
    )


REWARDS = [0.5, 0.75, 1.0]
COMMANDS = [("Serve it:", ["any-agent serve \\", "  --no-train"])]


def report(**changes: Any) -> Report:
    fields: dict[str, Any] = {
        "model": "tiny",
        "seed": 0,
        "steps": 3,
        "ranks": 2,
        "permuted_rewards": False,
        "before": BEFORE.accuracy,
        "after": AFTER.accuracy,
        "measures": {"before": BEFORE, "after": AFTER},
        "eval_sessions": 480,
        "train_sessions": 192,
        "failed_sessions": 0,
        "errors": [],
        "restarts": {},
        "run": "/tmp/demo/runs/me/demo/seed-0",
        "curve": "/tmp/demo/runs/me/demo/seed-0/reward.png",
        "checkpoint": "/tmp/demo/runs/me/demo/seed-0/checkpoints/step-00000025",
        "answers": [("Say the digit 3, cat.", "3"), ("Give the cat a 5.", "6")],
        "seconds": 67.84,
        "peak_memory_mib": 2741,
    }
    return Report(**(fields | changes))
