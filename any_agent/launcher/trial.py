"""What a trial's folder holds already: its settings and its newest weights. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from any_agent.auth.access import require_key, run_dir_of
from any_agent.config import Config, load_config
from any_agent.errors import ConfigError
from any_agent.rundir.layout import RunDir, checkpoint_problem, read_json, weights_folder

_STEP = re.compile(r"step-(\d{8,})")
_VERSION = re.compile(r"v(\d{8,})")


@dataclass(frozen=True, slots=True)
class TrialWeights:
    """A folder that an engine loads, and the version under which it serves it."""

    path: Path
    version: int


@dataclass(frozen=True, slots=True)
class SavedWeights(TrialWeights):
    """A checkpoint's."""

    step: int


def trial_dir(config: Config) -> RunDir:
    return run_dir_of(config)


def resolve_config(path: str | None, overrides: Sequence[str]) -> Config:
    """The settings to start with; without a file, those that the trial was started with before.

    Raises ConfigError for a trial that was started from another model, as its checkpoints, sessions
    and template belong together, or with another number of ranks, as each has sessions of its own,
    and for an address that others reach without an admin key.
    """
    config = _with_saved(path, overrides)
    require_key(config, config.server.host)
    return config


def _with_saved(path: str | None, overrides: Sequence[str]) -> Config:
    config = load_config(path, overrides)
    trial_dir(config).check_format()
    saved = trial_dir(config).path / "config.yaml"
    if not saved.is_file():
        return config
    before = load_config(saved, environ={})
    if path is None:
        config = load_config(saved, overrides)
    elif not config.model.path:
        config = load_config(path, [*overrides, f"model.path={before.model.path}"])
    _require_same(config, before)
    return config


def require_same_trial(config: Config) -> None:
    """ConfigError for settings that the trial cannot go on with, as :func:`resolve_config`."""
    trial_dir(config).check_format()
    saved = trial_dir(config).path / "config.yaml"
    if saved.is_file():
        _require_same(config, load_config(saved, environ={}))
    require_key(config, config.server.host)


def _require_same(config: Config, before: Config) -> None:
    if config.model.path and config.model.path != before.model.path:
        raise ConfigError(
            f"{config.experiment}/{config.trial} was started from {before.model.path}, not from "
            f"{config.model.path}; choose another --trial, or leave the model out"
        )
    if config.server.ranks != before.server.ranks:
        raise ConfigError(
            f"{config.experiment}/{config.trial} was started with {before.server.ranks} ranks, not "
            f"{config.server.ranks}, and each has sessions of its own; start it with server.ranks="
            f"{before.server.ranks}, or choose another --trial"
        )


def newest_weights(config: Config) -> TrialWeights | None:
    """What an engine that starts now should serve: what was published last, else the checkpoint.

    A published folder was renamed into place when it was whole.
    """
    weights = trial_dir(config).weights
    names = (_VERSION.fullmatch(path.name) for path in weights.glob("v*"))
    versions = [int(match[1]) for match in names if match]
    saved = latest_weights(config)
    if not versions or (saved is not None and saved.version > max(versions)):
        return saved
    return TrialWeights(weights_folder(weights, max(versions)), max(versions))


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
    return SavedWeights(path, int(saved["state"]["version"]), int(match[1]))


def kept_weights(config: Config) -> dict[int, TrialWeights]:
    """All models that the trial still has, by version: the one that it began with, as 0, what was
    published last, and whole checkpoints."""
    run = trial_dir(config)
    there = {0: TrialWeights(Path(config.model.path), 0)} if config.model.path else {}
    for path in run.weights.glob("v*"):
        if match := _VERSION.fullmatch(path.name):
            there[int(match[1])] = TrialWeights(path, int(match[1]))
    for path in run.checkpoints.glob("step-*"):
        if _STEP.fullmatch(path.name) and checkpoint_problem(path) is None:
            version = int(read_json(path / "trainer" / "state.json")["state"]["version"])
            there[version] = TrialWeights(path, version)
    return there
