"""Training on recorded sessions that another grader has graded, beside the run's own steps."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from any_agent.config import Config
from any_agent.launcher import Node, NodeOptions
from any_agent.launcher.trial import trial_dir
from tests.e2e.test_resume import config_for, drive
from tests.support.e2e.serving import CLI

pytestmark = pytest.mark.timeout(600)

GRADERS = """
def as_the_agents(session):
    said = "".join(call["output_message"]["content"] or "" for call in session["interactions"])
    return (sum(map(ord, said)) % 101) / 100

def the_other_way_round(session):
    return -as_the_agents(session)

def all_alike(session):
    return 0.0
"""
Regrade = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Config:
    """A run of two steps, of which it has the first checkpoint only."""
    settings = {"train.steps": 2, "train.checkpoint_every": 1, "train.keep_checkpoints": 3}
    config = config_for(tmp_path_factory.mktemp("run"), tiny_model_dir, **settings)
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        asyncio.run(drive(node))
    checkpoints = trial_dir(config).checkpoints
    shutil.move(checkpoints / "step-00000002", checkpoints.parent / "second")
    (checkpoints / "latest").write_text("step-00000001\n")
    return config


@pytest.fixture
def regrade(config: Config, tmp_path: Path) -> Regrade:
    (tmp_path / "my_graders.py").write_text(GRADERS)

    def run(grader: str, *more: str) -> subprocess.CompletedProcess[str]:
        named = (f"root={config.root}", f"user={config.user}")
        trial = ("--experiment", config.experiment, "--trial", config.trial)
        command = [*CLI, "regrade", f"my_graders.{grader}"]
        path = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}", "PATH": "/usr/bin:/bin"}
        command += ["--train", "new", *trial, *named, *more]
        return subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)

    return run


def files_of(config: Config) -> dict[Path, int]:
    """When the trial's files were changed, but for what SQLite's readers leave."""
    files = (p for p in trial_dir(config).path.rglob("*") if p.parent.name != "journal")
    return {path: path.stat().st_mtime_ns for path in files if path.name != "journal"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_same_rewards_make_the_step_that_the_run_made(
    config: Config, regrade: Regrade, tmp_path: Path
) -> None:
    """The second step is made again: from the first checkpoint, with its optimizer."""
    files = files_of(config)
    done = regrade("as_the_agents")
    assert done.returncode == 0, done.stderr
    # Four of the first step, and those that came after the last one.
    assert re.search(r"left out  [4-6] sessions: of weights more than rollout.eta=0", done.stdout)
    assert "1 steps on 4 sessions" in done.stdout
    made, run = weights(tmp_path / "new"), weights(trial_dir(config).path / "second")
    assert made.keys() == run.keys()
    assert all(torch.equal(made[name], run[name]) for name in run)
    assert files_of(config) == files
    assert not list(tmp_path.glob("*.sessions"))


def test_opposite_rewards_move_the_weights_the_other_way(
    config: Config, regrade: Regrade, tmp_path: Path
) -> None:
    start = weights(trial_dir(config).checkpoints / "step-00000001")
    moved = []
    for number, grader in enumerate(("as_the_agents", "the_other_way_round")):
        # Without the momentum of the step before.
        done = regrade(grader, "train.betas=[0, 0.99]", f"--out={number}.jsonl")
        assert done.returncode == 0, done.stderr
        made = weights((tmp_path / "new").rename(tmp_path / str(number)))
        moved.append(torch.cat([(made[name] - start[name]).flatten() for name in start]))
    assert torch.nn.functional.cosine_similarity(*moved, dim=0) < -0.99


@pytest.mark.parametrize(
    ("grader", "more", "says"),
    [
        (
            "all_alike",
            ("train.dynamic_sampling=refill",),
            "no session is left to train on at step 1",
        ),
        ("as_the_agents", ("--since", "2100-01-01"), "no session is left to train on"),
        ("as_the_agents", ("train.lr_schedule=linear", "train.steps=1"), "learning rate of 0"),
        ("as_the_agents", ("--json",), "--json prints no training"),
    ],
)
def test_what_cannot_be_trained_on_writes_nothing(
    regrade: Regrade, tmp_path: Path, grader: str, more: tuple[str, ...], says: str
) -> None:
    done = regrade(grader, *more)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert not (tmp_path / "new").exists()


def test_an_existing_folder_is_kept_and_grades_are_used_again(
    regrade: Regrade, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    done = regrade("as_the_agents")
    assert done.returncode == 2 and "name a new folder" in done.stderr
    (tmp_path / "new").rmdir()
    assert regrade("as_the_agents", "rollout.eta=1").returncode == 0
    lines = (tmp_path / "regraded.jsonl").read_text().splitlines()[1:]
    assert len({json.loads(line)["session_id"] for line in lines}) == len(lines) >= 8
