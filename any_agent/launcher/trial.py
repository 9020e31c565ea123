"""What a trial's folder holds already: its settings and its newest weights. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from any_agent.config import LOOPBACK, Config, load_config
from any_agent.errors import ConfigError
from any_agent.rundir import RunDir, checkpoint_problem, read_json

_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """A checkpoint, and the version under which an engine serves it."""

    path: Path
    step: int
    version: int


def trial_dir(config: Config) -> RunDir:
    return RunDir.of(config.root, config.user, config.experiment, config.trial)


def resolve_config(path: str | None, overrides: Sequence[str]) -> Config:
    """The settings to start with; without a file, those that the trial was started with before.

    Raises ConfigError for a trial that was started from another model: its checkpoints, sessions
    and template belong together.
    """
    config = load_config(path, overrides)
    saved = trial_dir(config).path / "config.yaml"
    if not saved.is_file():
        return config
    # Its admin key is in no file, and without one only this machine's addresses are valid.
    before = load_config(saved, [f"server.host={LOOPBACK[0]}"], environ={})
    if path is None:
        config = load_config(saved, overrides)
    elif not config.model.path:
        config = load_config(path, [*overrides, f"model.path={before.model.path}"])
    if config.model.path and config.model.path != before.model.path:
        raise ConfigError(
            f"{config.experiment}/{config.trial} was started from {before.model.path}, not from "
            f"{config.model.path}; choose another --trial, or leave the model out"
        )
    return config


def latest_weights(config: Config) -> SavedWeights | None:
    """The trial's latest checkpoint, or None where nothing was kept yet.

    ``latest`` names it; a checkpoint counts only if its manifest, written last, agrees with it.
    """
    run = trial_dir(config)
    try:
        name = (run.checkpoints / "latest").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    match = _STEP.fullmatch(name)
    path = run.checkpoints / name
    if match is None or checkpoint_problem(path) is not None:
        return None
    saved = read_json(path / "trainer" / "state.json")
    # The version that just these weights were published as; later ones are other weights.
    return SavedWeights(path, int(match[1]), int(saved["state"]["version"]))
