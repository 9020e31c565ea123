"""A trial's folder with checkpoints, as training leaves it, made by code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from any_agent.config import load_config
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.checksums import write_manifest
from any_agent.rundir.layout import RunDir


def save_checkpoint(run: RunDir, step: int, version: int, model: Path) -> Path:
    """A whole one with a model's files, and the latest."""
    path = run.checkpoints / f"step-{step:08d}"
    (path / "trainer").mkdir(parents=True)
    for file in model.iterdir():
        (path / file.name).symlink_to(file)
    (path / "trainer" / "state.json").write_text(json.dumps({"state": {"version": version}}))
    write_manifest(path)
    (run.checkpoints / "latest").write_text(f"{path.name}\n")
    return path


def save_trial(
    root: Path, checkpoints: Mapping[tuple[int, int], Path], *settings: str, base: Path
) -> RunDir:
    """`exp/one` of the user `me`: a model for each step and version, in the order of training."""
    names = [f"root={root}", "user=me", "experiment=exp", "trial=one", f"model.path={base}"]
    config = load_config(None, [*names, "model.enable_thinking=false", *settings], environ={})
    run = trial_dir(config)
    run.create()
    (run.path / "config.yaml").write_text(yaml.safe_dump(config.dump()))
    for (step, version), model in checkpoints.items():
        save_checkpoint(run, step, version, model)
    return run
