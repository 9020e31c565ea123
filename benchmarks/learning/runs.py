"""One training of a tiny task from nothing to its figures, each part a process as anybody's."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning import retry_math, tool_use

ROOT = Path(__file__).resolve().parents[2]
TASKS = {"retry_math": retry_math, "tool_use": tool_use}
_COMMON: dict[str, Any] = {
    "experiment": "learning",
    "model.renderer": "default",
    "server.port": 0,
    "server.ranks": 1,
    "sessions.group_size": 8,
    "sessions.group_timeout": 120,
    "rollout.batch_size": 64,
    "rollout.max_concurrent": 128,
    "rollout.eta": 1,
    "train.betas": "[0.9, 0.95]",
    "eval.every": 1000,
    "eval.at_start": "true",
}
_OF_TASK: dict[str, dict[str, Any]] = {
    "retry_math": {
        "sampling.max_new_tokens": 4,
        "train.lr": 2e-3,
        "train.steps": 10,
        "eval.group_size": 4,
    },
    "tool_use": {
        "sampling.max_new_tokens": 32,
        "train.lr": 1e-3,
        "train.steps": 8,
        "eval.group_size": 2,
    },
}


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one training."""

    before: float
    """Mean reward of the validation set's runs before the first step."""
    after: float
    steps: int
    seconds: float
    """Seconds from the script's start to its end."""
    cpu_seconds: float
    """CPU seconds of all its processes, which do not depend on who else uses the machine."""
    rewards: list[float]
    """Mean score of each step's sessions; groups that all score the same are in none."""
    evals: list[float]
    """The rewards of all evaluations, in order."""

    @property
    def gain(self) -> float:
        return self.after - self.before


def prepare(folder: Path, task: str, seed: int) -> None:
    """The model and the dataset of a task."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid"):
        lines = [json.dumps(item) + "\n" for item in TASKS[task].items(split)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    model = ["benchmarks.learning.warm_models", task, str(folder / "model"), "--seed", str(seed)]
    _run([sys.executable, "-m", *model])


def settings_of(folder: Path, task: str, seed: int, **more: Any) -> list[str]:
    """The command line of a training; ``more`` are settings with ``__`` for dots."""
    settings = _COMMON | _OF_TASK[task]
    settings |= {
        "root": folder / "runs",
        "trial": f"{task}-{seed}",
        "model.path": folder / "model",
        "train_dataset.path": folder / "train.jsonl",
        "valid_dataset.path": folder / "valid.jsonl",
        "train.seed": seed,
    }
    settings |= {name.replace("__", "."): value for name, value in more.items()}
    return [f"{name}={value}" for name, value in settings.items()]


def train(folder: Path, task: str, seed: int, **more: Any) -> Figures:
    """Run the script on what :func:`prepare` left in the folder."""
    script = [sys.executable, str(ROOT / "benchmarks/learning/train.py"), f"task={task}"]
    began, used = time.monotonic(), _cpu_seconds()
    _run([*script, *settings_of(folder, task, seed, **more)])
    seconds, cpu_seconds = time.monotonic() - began, _cpu_seconds() - used
    (metrics,) = (folder / "runs").glob(f"*/learning/{task}-{seed}/metrics.jsonl")
    return figures_of(metrics, seconds, cpu_seconds)


def figures_of(metrics: Path, seconds: float, cpu_seconds: float) -> Figures:
    """Without evaluations ``before`` and ``after`` are nan."""
    evals = [line["eval"]["reward"] for line in _lines(metrics) if "eval" in line]
    rewards = rewards_of(metrics)
    return Figures(
        before=evals[0] if evals else math.nan,
        after=evals[-1] if evals else math.nan,
        steps=len(rewards),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        rewards=rewards,
        evals=evals,
    )


def rewards_of(metrics: Path) -> list[float]:
    """Return the reward of each step."""
    return [line["reward"] for line in _lines(metrics) if "eval" not in line]


def _lines(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def _cpu_seconds() -> float:
    """Return the seconds of all processes that have ended and been waited for, theirs too."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(command: list[str]) -> None:
    """AssertionError with what it said, if it fails."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{said}"
