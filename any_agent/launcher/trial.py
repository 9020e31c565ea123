"""A trial's saved settings, its weights, and the model that a service of it serves; no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from any_agent.auth.access import require_key, run_dir_of
from any_agent.config import SECRET_VARIABLES, Config, load_config
from any_agent.errors import ConfigError, NotFound
from any_agent.rundir.checksums import require_sound, sound, tensor_ends
from any_agent.rundir.fleet import Fleet, load_fleet
from any_agent.rundir.layout import (
    RunDir,
    checkpoint_problem,
    latest_step,
    published_versions,
    read_json,
    saved_steps,
    weights_folder,
)
from any_agent.runtime.environment import environment_without
from any_agent.runtime.signals import die_with_parent

CHECK_INTERVAL = 60.0
"""Seconds for which weights that were read count as undamaged: the engines of a node start at
once."""
_checked: dict[Path, float] = {}
"""When each folder was found to be undamaged, in monotonic seconds."""


@dataclass(frozen=True, slots=True)
class TrialWeights:
    """A folder of weights, and their version."""

    path: Path
    version: int


@dataclass(frozen=True, slots=True)
class SavedWeights(TrialWeights):
    """The weights of a checkpoint."""

    step: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The weights that the engines of a run serve: ``fixed``, else the newest."""

    config: Config
    fixed: TrialWeights | None

    def require(self, *, trains: bool) -> None:
        """Raise ConfigError if there is nothing to serve, or to begin training with."""
        saved = latest_weights if trains else newest_weights
        if self.fixed is None and saved(self.config) is None:
            check_model(self.config.model.path)

    def weights(self) -> tuple[str, int]:
        """Return the folder that an engine that starts now serves, and its version."""
        found = self.fixed or sound_weights(self.config)
        return (str(found.path), found.version) if found else (self.config.model.path, 0)

    def tokenizer(self) -> str:
        """Return the model's own folder, which stays; if it is gone, the one that engines load."""
        try:
            check_model(self.config.model.path)
        except ConfigError:
            return self.weights()[0]
        return self.config.model.path


def require_training(config: Config) -> None:
    """Raise ConfigError for a reference model or teacher that cannot exist, or if LoRA's package,
    or a layer that it names, is missing; the trainer checks names of a hub."""
    check_frozen(config)
    if config.train.lora is not None:
        require_peft()
        require_layers(Path(config.model.path).expanduser(), config.train.lora.target_modules)


def require_grader(config: Config) -> None:
    """Raise ConfigError if the settings' grader cannot be imported, before anything is started.

    It is imported in a process of its own, without secrets, as when it grades.
    """
    sessions = config.sessions
    if sessions.late_reward != "grade" and not sessions.implicit:
        return
    try:
        done = subprocess.run(
            [sys.executable, "-m", "any_agent.rewards.grader", "--check", sessions.grader],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=sessions.grader_timeout,
            env=environment_without(SECRET_VARIABLES),
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
        )
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        failed = done.returncode != 0
    except subprocess.TimeoutExpired:
        failed, why = True, f"its import took more than {sessions.grader_timeout:g} s"
    if failed:
        raise ConfigError(
            f"sessions.grader={sessions.grader} cannot be used: {why}. Write it as "
            "module.function, and start from the folder that the module is in, or put that folder "
            "into PYTHONPATH"
        )


def require_no_dataset_settings(config: Config) -> None:
    """Raise ConfigError for passes over a dataset, or a choice among its items, where there is
    none."""
    if config.train.epochs is not None:
        raise ConfigError(
            f"train.epochs={config.train.epochs} counts passes over a dataset, and there is none: "
            "external agents are trained on, for train.steps steps. Leave train.epochs out, or "
            "train on a dataset by GRPOTrainer(config, train_dataset=...).train(workflow=...)"
        )
    if config.rollout.sampling != "uniform":
        raise ConfigError(
            f"rollout.sampling={config.rollout.sampling} chooses among the items of a dataset, and "
            "there is none: external agents bring their own tasks. Leave it out"
        )


def require_layers(model: Path, names: Sequence[str]) -> None:
    """Raise ConfigError for names of layers that no weight of a model's folder has.

    It reads the names of the weights alone: the trainer knows the layers. A folder whose weights
    cannot be listed is refused when it is loaded.
    """
    known = {weight.removesuffix(".weight").rpartition(".")[2] for weight in _weights_of(model)}
    missing = [name for name in names if name.rpartition(".")[2] not in known]
    if known and missing:
        raise ConfigError(
            f"train.lora.target_modules: {model} has no layer named {', '.join(missing)}; it has "
            f"{', '.join(sorted(known))}"
        )


def _weights_of(model: Path) -> set[str]:
    """Return the names of the weights in a folder, none where they cannot be read."""
    try:
        index = read_json(model / "model.safetensors.index.json")
        if index is not None:
            return set(index["weight_map"])
        return set(tensor_ends(model / "model.safetensors"))
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def check_frozen(config: Config) -> None:
    """Raise ConfigError for a reference model or teacher that is set and cannot exist."""
    for name in ("reference_model", "teacher"):
        if path := getattr(config.train, name):
            check_model(path, f"train.{name}")


def require_peft() -> None:
    """Raise ConfigError, with the extra to install, if peft is missing."""
    if find_spec("peft") is None:
        raise ConfigError(
            "train.lora is set, but the package peft is not installed: "
            'pip install "any-agent-rl[lora]", or leave train.lora out'
        )


def check_model(path: str, setting: str = "model.path") -> None:
    """Raise ConfigError for a model that cannot exist; the engine checks names of a hub."""
    if not path:
        raise ConfigError(
            "no model is configured: give --model, or set model.path, a local folder or a hub name "
            "as Qwen/Qwen3-0.6B; `python -m any_agent.demo.model` makes a tiny one"
        )
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        _require_whole_files(folder)
        return
    is_path = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if folder.exists():
        problem = "is no model folder: it has no config.json"
    elif is_path:
        problem = "is no model folder: there is nothing at this path"
    elif "/" not in path:
        problem = "is no model folder, and no name on a hub, which has an owner"
    else:
        return  # The hub knows whether it has this name.
    raise ConfigError(
        f"{setting}={path} {problem}. Name a folder with a config.json and weights, or a hub's "
        "model as OWNER/NAME, like Qwen/Qwen3-0.6B; `python -m any_agent.demo.model "
        "FOLDER` makes one"
    )


def _require_whole_files(folder: Path) -> None:
    """Raise ConfigError for a file of weights that is cut off, as a broken copy leaves it."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensor_ends(path)
        except ValueError as error:
            raise ConfigError(
                f"{path} is cut off or damaged: {error}; copy or download the model again"
            ) from error


def trial_dir(config: Config) -> RunDir:
    return run_dir_of(config)


def resolve_config(path: str | None, overrides: Sequence[str]) -> Config:
    """Return the settings to start with; without a file, those of the trial's last start.

    Raises ConfigError for a trial that was started from another model, as its checkpoints, sessions
    and template belong together, and for an address that others reach without an admin key.
    """
    config = _with_saved(path, overrides)
    require_key(config, config.server.host)
    config.require_litellm()
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
    """Raise ConfigError for settings that :func:`resolve_config` would refuse for the trial."""
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


def require_same_ranks(config: Config, before: Fleet | None) -> None:
    """Raise ConfigError unless the ranks are 0, 1, ... as many as ``before``, which had sessions:
    where ranks have their places on nodes."""
    if before is not None and before.ranks != tuple(range(config.server.ranks)):
        numbers = ", ".join(map(str, before.ranks))
        raise ConfigError(
            f"{config.experiment}/{config.trial} has the ranks {numbers}, and each has sessions of "
            f"its own; a Slurm job cannot change them to {config.server.ranks} from 0 on: choose "
            "nodes for as many, or another --trial"
        )


def fleet_before(config: Config) -> Fleet | None:
    """Return the ranks of the trial's last start; None before its first one."""
    run = trial_dir(config)
    saved = run.path / "config.yaml"
    if (fleet := load_fleet(run.fleet)) is not None or not saved.is_file():
        return fleet
    return Fleet.of(load_config(saved, environ={}).server.ranks)


def newest_weights(config: Config) -> TrialWeights | None:
    """Return the weights for an engine that starts now: the last published, else the checkpoint's.

    A published folder is complete: it was renamed into place after it was written. Its content is
    not read.
    """
    weights = trial_dir(config).weights
    newest = max(published_versions(weights), default=None)
    saved = latest_weights(config)
    if newest is None or (saved is not None and saved.version > newest):
        return saved
    return TrialWeights(weights_folder(weights, newest), newest)


def sound_weights(config: Config) -> TrialWeights | None:
    """Return the newest weights that are what was written; damaged ones are set aside.

    Raises ConfigError if the trial had checkpoints and none is left: engines must not serve the
    initial model in their place.
    """
    while (found := newest_weights(config)) is not None:
        if time.monotonic() < _checked.get(found.path, 0.0) + CHECK_INTERVAL:
            return found
        if sound(found.path):
            _checked[found.path] = time.monotonic()
            return found
    checkpoints = trial_dir(config).checkpoints
    if latest_step(checkpoints) is not None:
        raise ConfigError(
            f"no weights in {trial_dir(config).path} are whole, neither checkpoints nor published "
            "ones: restore one from a copy, or choose another --trial to begin anew"
        )
    return None


def latest_weights(config: Config) -> SavedWeights | None:
    """Return the trial's latest checkpoint, or None before the first one.

    ``latest`` names it, and stands for the newest one before it where that is not complete. A
    checkpoint counts only if its manifest, written last, agrees with it.
    """
    checkpoints = trial_dir(config).checkpoints
    limit = latest_step(checkpoints)
    steps = saved_steps(checkpoints) if limit is not None else {}
    for step, path in reversed(steps.items()):
        if limit is not None and step <= limit and checkpoint_problem(path) is None:
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                return _saved(path, step)
    return None


def _saved(path: Path, step: int) -> SavedWeights:
    # The version of exactly these weights; later versions are other weights.
    state = read_json(path / "trainer" / "state.json")
    if state is None:
        raise FileNotFoundError(f"{path} has been removed")
    version = state["state"]["version"]
    return SavedWeights(path, int(version), step)


def _checkpoints(config: Config) -> list[SavedWeights]:
    """Return the complete checkpoints by their steps."""
    found = []
    for step, path in saved_steps(run_dir_of(config).checkpoints).items():
        # A training that goes on may remove an old checkpoint meanwhile.
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            if checkpoint_problem(path) is None:
                found.append(_saved(path, step))
    return found


def kept_weights(config: Config) -> dict[int, TrialWeights]:
    """Return all weights that the trial still has, by version: the initial model, as version 0, the
    published ones, and complete checkpoints."""
    there = {0: TrialWeights(Path(config.model.path), 0)} if config.model.path else {}
    weights = run_dir_of(config).weights
    for version in published_versions(weights):
        there[version] = TrialWeights(weights_folder(weights, version), version)
    return there | {saved.version: saved for saved in _checkpoints(config)}


def find_trial(place: Config) -> Path:
    """Return the file of a trial's saved settings; NotFound lists the existing trials."""
    run = run_dir_of(place)
    run.check_format()
    saved = run.path / "config.yaml"
    if saved.is_file():
        return saved
    raise run.no_trial("set root and user to those of its training")


def find_weights(
    config: Config, *, step: int | None = None, version: int | None = None
) -> TrialWeights:
    """Return the trial's latest checkpoint, or the weights of a step or a version.

    Version 0 is the initial model. Raises NotFound, which lists the steps and versions that exist.
    """
    found: TrialWeights | None
    if version is not None:
        found, problem = kept_weights(config).get(version), f"has not kept version {version}"
    elif step is not None:
        found = next((saved for saved in _checkpoints(config) if saved.step == step), None)
        problem = f"has no checkpoint of step {step}"
    else:
        newest = latest_weights(config)
        # Not an earlier one in its place: nobody would notice.
        latest = latest_step(run_dir_of(config).checkpoints)
        found = newest if newest is not None and newest.step == latest else None
        problem = f"has no complete checkpoint yet in {run_dir_of(config).checkpoints}"
    if found is None:
        name = f"{config.experiment}/{config.trial}"
        listed = [f"{saved.step} (version {saved.version})" for saved in _checkpoints(config)]
        numbers = ", ".join(map(str, sorted(kept_weights(config)))) or "none"
        raise NotFound(
            f"{name} {problem}; there are steps {', '.join(listed) or '(none yet)'}; versions "
            f"{numbers} (0 is the initial model): name one by eval --model {name}@0, or replay "
            "--version 0"
        )
    if version == 0:
        check_model(str(found.path))
    else:
        require_sound(found.path)
    return found
