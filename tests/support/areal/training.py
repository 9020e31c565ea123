"""A training script as its author runs it: a process of its own, known by what it leaves."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.e2e.serving import environment

_LIMIT = 600.0
"""Seconds, for a whole script."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a script's run left."""

    said: str
    folder: Path
    steps: list[dict[str, Any]]
    """The lines of `metrics.jsonl` that are of a step."""


def tasks(file: Path, count: int) -> Path:
    """Sums to do, one a line, as AReaL's documents have them: `messages` and `answer`."""
    rows = (
        {
            "messages": [{"role": "user", "content": f"What is {k} and {k + 1}?"}],
            "answer": str(2 * k + 1),
        }
        for k in range(1, count + 1)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def settings(model: Path, engine: str, data: Path | None, folder: Path) -> list[str]:
    """Two steps of two groups of two on an engine that a test scripts."""
    return [
        f"model.path={model}",
        "model.enable_thinking=false",
        f"engine.urls={engine}",
        "server.ranks=1",
        "server.port=0",
        f"root={folder}",
        "experiment=documents",
        "trial=one",
        *([f"train_dataset.path={data}"] if data else []),
        "rollout.batch_size=4",
        "sessions.group_size=2",
        "train.steps=2",
        "train.lr=1e-3",
    ]


def trained(
    python: str | Path, script: Path, given: Sequence[str], *, cwd: Path, **variables: str
) -> Trained:
    """Run the script to its end; fails with all that it said if it does not end well."""
    done = subprocess.run(
        [python, script, *given],
        cwd=cwd,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    (metrics,) = cwd.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "step" in line and "eval" not in line]
    return Trained(said, metrics.parent, steps)
