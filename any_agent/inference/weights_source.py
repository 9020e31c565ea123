"""The weights of a script's engine: a trial's checkpoint, or a model's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from any_agent.config import LOOPBACK, Config, load_config
from any_agent.engine import EnginePool, RemoteEngine
from any_agent.errors import ConfigError
from any_agent.launcher.trial import TrialWeights, check_model, find_trial, find_weights

_PLACE = ("ANY_AGENT_ROOT", "ANY_AGENT_USER")


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Weights, and the settings of their training."""

    config: Config
    weights: TrialWeights


def find_weights_source(
    experiment: str | None,
    trial: str | None,
    *,
    user: str | None = None,
    root: str | Path | None = None,
    step: int | None = None,
    version: int | None = None,
    model: str | Path | None = None,
    settings: Config,
) -> WeightsSource | None:
    """Return a trial's latest checkpoint, or the weights of a step or a version (0: the initial
    model); or a model's weights, under ``settings``; None if neither is named.

    ``root`` is by default ``ANY_AGENT_ROOT``, else `runs`; ``user`` is ``ANY_AGENT_USER``, else the
    system's. Raises NotFound, which lists what exists; ConfigError for an invalid name and for a
    folder of another layout; ValueError for names that contradict each other.
    """
    if experiment is None or trial is None:
        if experiment is not None or trial is not None:
            raise ValueError("a trial is named by experiment_name and trial_name: give both")
        if step is not None or version is not None:
            raise ValueError("step and version are a trial's: give experiment_name and trial_name")
        if model is None:
            return None
        path = Path(model).expanduser() if str(model).startswith("~") else Path(model)
        check_model(str(model))
        return WeightsSource(settings, TrialWeights(path, 0))
    if model is not None:
        raise ValueError("a trial and a model are named: leave one of them out")
    if step is not None and version is not None:
        raise ValueError("a step and a version were given: give one of them")
    given = {"experiment": experiment, "trial": trial, "user": user, "root": root}
    names = [f"{name}={value}" for name, value in given.items() if value is not None]
    environ = {name: os.environ[name] for name in _PLACE if os.environ.get(name)}
    place = load_config(None, names, environ=environ)
    saved = find_trial(place)
    # The trial may have listened on other addresses, for which the admin key is missing here. This
    # process's environment may belong to another run.
    own = [f"root={place.root}", f"user={place.user}", f"server.host={LOOPBACK[0]}"]
    config = load_config(saved, [*names, *own], environ={})
    return WeightsSource(config, find_weights(config, step=step, version=version))


async def require_weights(pool: EnginePool, kept: WeightsSource | None) -> Path | None:
    """Return the folder of the engines' weights, as they report it.

    Raises ConfigError for an engine with other weights than the wanted ones. An engine that was
    started on their folder without a version reports version 0.
    """
    path = None
    for engine in pool.engines:
        if not isinstance(engine, RemoteEngine):
            continue
        info = await engine.info()
        path = Path(info["model_path"]) if info.get("model_path") else None
        if kept is None or engine.version == kept.weights.version != 0:
            continue
        same = _is_same(path, kept.weights.path) or (path is None and not kept.weights.version)
        if engine.version != 0 or not same:
            raise ConfigError(
                f"the engine at {engine.url} serves version {engine.version} of {path} instead of "
                f"version {kept.weights.version}, {kept.weights.path}: load that into it, or start "
                f"it with --model-path {kept.weights.path} --weight-version "
                f"{kept.weights.version}"
            )
    return path


def _is_same(one: Path | None, other: Path) -> bool:
    return one is not None and one.resolve() == other.resolve()
