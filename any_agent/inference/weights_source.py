"""Which weights are meant: a trial's checkpoint, or a model's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from any_agent.config import LOOPBACK, Config, load_config
from any_agent.engine import EnginePool, RemoteEngine
from any_agent.errors import ConfigError, NotFound
from any_agent.launcher.trial import (
    TrialWeights,
    check_model,
    kept_weights,
    latest_weights,
    trial_dir,
)
from any_agent.rundir.layout import checkpoint_problem, read_json

_PLACE = ("ANY_AGENT_ROOT", "ANY_AGENT_USER")
_SHOWN = 12
"""Names in an error's text."""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Weights, and the settings that they were trained under."""

    config: Config
    weights: TrialWeights


def named(
    experiment: str | None,
    trial: str | None,
    *,
    user: str | None,
    root: str | Path | None,
    step: int | None,
    version: int | None,
    model: str | Path | None,
    settings: Config,
) -> WeightsSource | None:
    """A trial's weights, or a model's, under ``settings``; None where neither is named.

    Raises as :func:`kept_model`; ValueError for names that contradict each other.
    """
    if (experiment is None) != (trial is None):
        raise ValueError("a trial is named by experiment_name and trial_name: give both")
    if experiment is not None and trial is not None:
        if model is not None:
            raise ValueError("a trial and a model are named: leave one of them out")
        return kept_model(experiment, trial, user=user, root=root, step=step, version=version)
    if step is not None or version is not None:
        raise ValueError("step and version are a trial's: give experiment_name and trial_name")
    if model is None:
        return None
    path = Path(model).expanduser() if str(model).startswith("~") else Path(model)
    check_model(str(model))
    return WeightsSource(settings, TrialWeights(path, 0))


def kept_model(
    experiment: str,
    trial: str,
    *,
    user: str | None = None,
    root: str | Path | None = None,
    step: int | None = None,
    version: int | None = None,
) -> WeightsSource:
    """A trial's latest checkpoint, that of a step, or the weights of a version (0: what the trial
    began with).

    ``root`` is by default ``ANY_AGENT_ROOT``, else `runs`; ``user`` is ``ANY_AGENT_USER``, else the
    system's. Raises NotFound, which says what there is; ConfigError for a name that is none and for
    a folder of another layout; ValueError for a step and a version.
    """
    if step is not None and version is not None:
        raise ValueError("a step and a version were given: a checkpoint is named by one of them")
    given = {"experiment": experiment, "trial": trial, "user": user, "root": root}
    names = [f"{name}={value}" for name, value in given.items() if value is not None]
    environ = {name: os.environ[name] for name in _PLACE if os.environ.get(name)}
    place = load_config(None, names, environ=environ)
    run = trial_dir(place)
    run.check_format()
    saved = run.path / "config.yaml"
    if not saved.is_file():
        raise NotFound(
            f"there is no trial {experiment}/{trial} in {run.path}: {_others(place)}; `root` and "
            "`user` say where it was trained"
        )
    # It may have served other machines, for which the admin key is missing here. This process's
    # environment is about another run.
    own = [f"root={place.root}", f"user={place.user}", f"server.host={LOOPBACK[0]}"]
    config = load_config(saved, [*names, *own], environ={})
    return WeightsSource(config, _weights(config, step, version))


async def require_weights(pool: EnginePool, kept: WeightsSource | None) -> Path | None:
    """Return the folder that the engines name as that of their weights.

    ConfigError for one that says that it has others than the wanted ones. One that was started on
    their folder calls them 0, if nobody told it a version.
    """
    path = None
    for engine in pool.engines:
        if not isinstance(engine, RemoteEngine):
            continue
        told = await engine.info()
        path = Path(told["model_path"]) if told.get("model_path") else None
        if kept is None or engine.version == kept.weights.version != 0:
            continue
        same = _is_same(path, kept.weights.path) or (path is None and not kept.weights.version)
        if engine.version != 0 or not same:
            raise ConfigError(
                f"the engine at {engine.url} serves version {engine.version} of {path}, and asked "
                f"for was version {kept.weights.version}, {kept.weights.path}: load that into it, "
                f"or start it with --model-path {kept.weights.path} --weight-version "
                f"{kept.weights.version}"
            )
    return path


def _is_same(one: Path | None, other: Path) -> bool:
    return one is not None and one.resolve() == other.resolve()


def _weights(config: Config, step: int | None, version: int | None) -> TrialWeights:
    name = f"{config.experiment}/{config.trial}"
    folder = trial_dir(config).checkpoints
    if version is not None:
        there = kept_weights(config)
        if version not in there:
            raise NotFound(f"{name} has not kept version {version}; {_listed(config)}")
        if version == 0:
            check_model(str(there[0].path))
        return there[version]
    if step is not None:
        steps = _steps(config)
        if step not in steps:
            raise NotFound(f"{name} has no checkpoint of step {step}; {_listed(config)}")
        return steps[step]
    latest = latest_weights(config)
    if latest is None:
        raise NotFound(f"{name} has no whole checkpoint yet in {folder}; {_listed(config)}")
    return latest


def _steps(config: Config) -> dict[int, TrialWeights]:
    """Whole checkpoints by their steps."""
    found = {}
    for path in sorted(trial_dir(config).checkpoints.glob("step-*")):
        number = path.name.removeprefix("step-")
        if number.isdecimal() and checkpoint_problem(path) is None:
            state = read_json(path / "trainer" / "state.json")["state"]
            found[int(number)] = TrialWeights(path, int(state["version"]))
    return found


def _listed(config: Config) -> str:
    steps = [f"{step} (version {w.version})" for step, w in _steps(config).items()]
    versions = ", ".join(map(str, sorted(kept_weights(config)))) or "none"
    return (
        f"there are steps {', '.join(steps) or 'none'}; versions {versions} (0 is the model that "
        "it began with)"
    )


def _others(place: Config) -> str:
    """The trials of this root, of all users."""
    root = Path(place.root).expanduser().absolute()
    found = sorted(
        f"{path.parts[-3]}/{path.parts[-2]} (user {path.parts[-4]})"
        for path in root.glob("*/*/*/config.yaml")
    )
    if not found:
        return f"there are no trials in {root}"
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"in {root} there are {', '.join(found[:_SHOWN])}{more}"
