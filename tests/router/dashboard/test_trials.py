"""Other trials of an experiment, and the lines that serve checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path

from any_agent.rundir.layout import RunDir
from router.dashboard.trials import serve_commands, trials_beside


def trial(root: Path, name: str, *, at: float) -> RunDir:
    run = RunDir.of(root, "me", "exp", name)
    run.path.mkdir(parents=True)
    run.metrics.write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    os.utime(run.metrics, (at, at))
    return run


def test_the_others_that_have_made_a_step_the_latest_first(tmp_path: Path) -> None:
    mine = trial(tmp_path, "mine", at=9)
    trial(tmp_path, "old", at=1)
    trial(tmp_path, "new", at=5)
    RunDir.of(tmp_path, "me", "exp", "no-step").path.mkdir()
    (mine.path.parent / "a-file").write_text("")
    choices, none = trials_beside(mine, "")
    assert [(each.name, each.chosen, each.link) for each in choices] == [
        ("new", False, "new"),
        ("old", False, "old"),
    ]
    assert none == {}
    choices, beside = trials_beside(mine, "old,../../x,mine,no-step")
    assert [(each.name, each.chosen, each.link) for each in choices] == [
        ("new", False, "old,new"),
        ("old", True, ""),
    ]
    assert {name: run.last for name, run in beside.items()} == {"old": {"step": 1, "reward": 0.5}}


def test_an_experiment_that_is_gone(tmp_path: Path) -> None:
    run = RunDir.of(tmp_path / "none", "me", "exp", "mine")
    assert trials_beside(run, "x") == ([], {}) and serve_commands(run) == []


def test_whole_checkpoints_are_named(tmp_path: Path) -> None:
    run = trial(tmp_path / "a folder", "mine", at=1)
    for step in range(1, 8):
        folder = run.checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "x").write_text("1")
        (folder / "manifest.json").write_text(json.dumps({"files": {"x": 2 if step == 6 else 1}}))
    found = serve_commands(run)
    assert [step for step, _ in found] == [7, 5, 4, 3]
    assert found[0][1] == (
        "any-agent serve --no-train --experiment served --trial mine-step-7 "
        f"--model '{run.checkpoints}/step-00000007'"
    )
