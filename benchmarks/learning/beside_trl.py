"""Draw learning curves of any-agent and of TRL's GRPOTrainer on the same task and models.

``python benchmarks/learning/beside_trl.py docs/explanation/beside-trl.png [--seeds N]``. Each
seed's model learns sums in one turn, by any-agent waiting for each batch, by any-agent with agents
that run ahead, and by TRL, with the same settings. Before that an agent with a tool is trained in
deterministic runs by padded rows, by the tree of prefixes, and depth-first in small passes: the
three have the same curve.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.learning.curves import picture, summary
from benchmarks.learning.runs import ROOT, Figures, prepare, train

TASK = "retry_math"
STEPS = 16
EVERY = 2
LEARNING_RATE = 8e-4
"""Slower than need be, so that there is a curve to see."""
SETTINGS: dict[str, Any] = {"max_turns": 1, "train__steps": STEPS, "train__lr": LEARNING_RATE}
WAITING: dict[str, Any] = {"rollout__eta": 0}
AHEAD: dict[str, Any] = {"rollout__eta": 2}
DETERMINISTIC: dict[str, Any] = {
    "rollout__eta": 0,
    "rollout__deterministic": "true",
    "rollout__max_concurrent": 64,
    "engine__max_running_requests": 1,
    "eval__at_start": "false",
}
EXECUTIONS: dict[str, dict[str, Any]] = {
    "tree": {},
    "rows": {"train__packing": "rows"},
    "depth-first": {"train__micro_batch_tokens": 16},
}


def ours(folder: Path, task: str, seed: int, **more: Any) -> Figures:
    """Return the figures of a run by any-agent, on a copy of the folder."""
    with tempfile.TemporaryDirectory(prefix="any-agent-curves-") as temporary:
        copy = Path(temporary, "run")
        shutil.copytree(folder, copy)
        return train(copy, task, seed, **more)


def compare_executions(folder: Path, seed: int) -> None:
    """Print the rewards of the steps of deterministic runs, by each execution."""
    prepare(folder, "tool_use", seed)
    for name, execution in EXECUTIONS.items():
        say(seed, name, ours(folder, "tool_use", seed, **DETERMINISTIC, **execution).rewards)


def trl(folder: Path, seed: int) -> list[float]:
    """Return the validation set's rewards of a run by TRL, in a process of its own."""
    options = {"--seed": seed, "--steps": STEPS, "--every": EVERY, "--lr": LEARNING_RATE}
    words = [str(word) for pair in options.items() for word in pair]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.learning.trl_training", str(folder), *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rewards: list[float] = json.loads(done.stdout.splitlines()[-1])
    return rewards


def say(seed: int, name: str, rewards: list[float]) -> None:
    """Print a curve."""
    print(f"seed {seed} {name:<40}", *(f"{reward:.3f}" for reward in rewards), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw any-agent's curves beside TRL's.")
    parser.add_argument("png", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    curves: dict[str, list[list[float]]] = {
        "any-agent, waiting for each batch": [],
        "any-agent, agents up to 2 steps ahead": [],
        "TRL": [],
    }
    with tempfile.TemporaryDirectory(prefix="any-agent-curves-") as root:
        compare_executions(Path(root, "executions"), seed=0)
        for seed in range(arguments.seeds):
            folder = Path(root, f"{seed}")
            prepare(folder, TASK, seed)
            found = [
                ours(folder, TASK, seed, **SETTINGS, **WAITING, eval__every=EVERY).evals,
                ours(folder, TASK, seed, **SETTINGS, **AHEAD, eval__every=EVERY).evals,
                trl(folder, seed),
            ]
            for (name, runs), rewards in zip(curves.items(), found, strict=True):
                runs.append(rewards)
                say(seed, name, rewards)
    for name, runs in curves.items():
        print(summary(name, runs, last=3))
    picture(
        curves,
        every=EVERY,
        first=0,
        title="Sums in one turn: the same models, settings and steps",
        reward="mean reward on held-out items",
    ).savefig(arguments.png)


if __name__ == "__main__":
    main()
