"""Frameworks that force tool calls train a tiny model on them, and its reward rises.

The short form makes a few steps with each framework, ``--long`` more of them for a larger rise.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clients.client import APART
from tests.clients.environment import python_with
from tests.support.e2e.serving import environment
from tests.support.examples import ROOT

HERE = Path(__file__).parent
FRAMEWORKS = ("smolagents", "instructor", "openai_agents")
LIMIT = 800.0
OPENING = re.compile(r'<tool_call>\n\{"name": "(add|final_answer)", "arguments":$')
"""The end of every prompt: the framework has one tool, and forces its call."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("forced-tools") / "model"
    run([sys.executable, HERE / "model.py", out], out.parent)
    return out


def run(command: Sequence[str | Path], folder: Path) -> None:
    """Run a command; AssertionError with all that it said if it fails."""
    done = subprocess.run(
        command,
        env=environment(**APART, PYTHONPATH=str(ROOT), HOME=str(folder), OMP_NUM_THREADS="1"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def settings(folder: Path, model: Path, *, long: bool) -> dict[str, Any]:
    return {
        "experiment": "forced-tools",
        "trial": "first",
        "root": folder / "runs",
        "model.path": model,
        "model.enable_thinking": "false",
        "server.ranks": 1,
        "server.port": 0,
        "sampling.max_new_tokens": 32,
        "sessions.group_size": 8,
        "rollout.batch_size": 64,
        "rollout.max_concurrent": 64,
        "rollout.dump_to_file": "true",
        "train.lr": 1e-3,
        "train.steps": 12 if long else 4,
        "train.seed": 0,
        # Groups that score the same are in no step, so steps do not show the rise.
        "eval.every": 1000,
        "eval.at_start": "true",
        "eval.group_size": 4 if long else 2,
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_reward_rises(
    framework: str,
    model: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Any,
) -> None:
    python = python_with(f"forced-{framework}")
    given = settings(tmp_path, model, long=request.config.getoption("--long"))
    run(
        [
            *(python, HERE / "train.py", f"agent={framework}_agent"),
            *(f"{name}={value}" for name, value in given.items()),
        ],
        tmp_path,
    )
    (metrics,) = (tmp_path / "runs").rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    before, after = (line["eval"]["reward"] for line in lines if "eval" in line)
    record_property("figure", f"{framework}: reward {before:.2f} -> {after:.2f}")
    trained = [
        json.loads(line)
        for file in sorted(metrics.parent.glob("rollout/*/*"))
        for line in file.read_text().splitlines()
    ]
    forced = [row for row in trained if OPENING.search(row["prompt"])]
    assert len(forced) >= 64 * given["train.steps"]
    assert not any("<tool_call>" in row["completion"][:20] for row in forced)
    assert {row["reward"] for row in forced} == {0.0, 1.0}
    assert after >= before + (0.3 if given["train.steps"] > 4 else 0.1), (before, after)
