"""Which weights a name means; what is not there is told with what is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from any_agent import RemoteSGLangEngine
from any_agent.config import Config
from any_agent.errors import ConfigError, NotFound
from any_agent.inference.weights_source import WeightsSource, find_weights_source
from any_agent.rundir.layout import RunDir
from tests.support.errors import fails_with
from tests.support.trials import save_trial

NAMES: dict[str, Any] = {"experiment": "exp", "trial": "one", "user": "me"}


def root_of(run: RunDir) -> Path:
    return run.path.parents[2]


def kept_model(experiment: str, trial: str, **names: Any) -> WeightsSource:
    found = find_weights_source(experiment, trial, **names, settings=Config())
    assert found is not None
    return found


def test_a_checkpoint_is_found_by_step_or_version(trial: RunDir, models: list[Path]) -> None:
    ten, twenty = (trial.checkpoints / f"step-000000{step}" for step in (10, 20))
    for asked, folder, version in (
        ({}, twenty, 21),
        ({"step": 10}, ten, 11),
        ({"version": 11}, ten, 11),
        ({"version": 21}, twenty, 21),
        # What it began with.
        ({"version": 0}, models[0], 0),
    ):
        found = kept_model(**NAMES, root=root_of(trial), **asked)
        assert (found.weights.path, found.weights.version) == (folder, version), asked
        assert found.config.model.enable_thinking is False, "its settings are the trial's"


def test_weights_are_found_by_the_root_and_user_of_the_environment(
    trial: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other settings there are about another run."""
    monkeypatch.setenv("ANY_AGENT_MODEL__RENDERER", "of-another-run")
    monkeypatch.setenv("ANY_AGENT_USER", "me")
    monkeypatch.setenv("ANY_AGENT_ROOT", str(root_of(trial)))
    assert kept_model("exp", "one").weights.version == 21
    monkeypatch.delenv("ANY_AGENT_ROOT")
    monkeypatch.chdir(tmp_path)
    runs = save_trial(tmp_path / "runs", {}, base=tmp_path)
    with fails_with(NotFound, "runs/me/exp/one/checkp"):
        kept_model("exp", "one")
    assert runs.path.is_relative_to(tmp_path / "runs")


def test_a_missing_checkpoint_is_told_with_those_that_exist(trial: RunDir, tmp_path: Path) -> None:
    here: dict[str, Any] = {**NAMES, "root": root_of(trial)}
    for asked, error, says in (
        ({"step": 15}, NotFound, "10 (version 11), 20"),
        ({"version": 15}, NotFound, "versions 0, 11, 21"),
        ({"step": 10, "version": 11}, ValueError, "step"),
        ({"trial": "two"}, NotFound, "exp/one (user me"),
        ({"user": "you"}, NotFound, "exp/one (user me)"),
        ({"experiment": "../exp"}, ConfigError, "experiment"),
        ({"root": tmp_path / "none"}, NotFound, "no trials"),
    ):
        with fails_with(error, says):
            kept_model(**(here | asked))


def test_a_checkpoint_that_is_not_whole_or_of_an_older_layout_is_not_used(
    tmp_path: Path, models: list[Path]
) -> None:
    run = save_trial(tmp_path, {(10, 11): models[0], (20, 21): models[1]}, base=models[0])
    (run.checkpoints / "step-00000020" / "manifest.json").unlink()
    with fails_with(NotFound, "10 (version 11)"):
        kept_model(**NAMES, root=tmp_path)
    (run.path / "format").unlink()
    with fails_with(ConfigError, "format '1'"):
        kept_model(**NAMES, root=tmp_path)


def test_names_of_weights_that_contradict_each_other_are_refused() -> None:
    names = dict.fromkeys(("experiment", "trial", "user", "root", "step", "version", "model"))
    for changes, error, says in (
        ({"experiment": "exp"}, ValueError, "trial"),
        ({"experiment": "e", "trial": "t", "model": "m"}, ValueError, "model"),
        ({"model": "m", "step": 1}, ValueError, "step and version"),
        ({"model": "/no/such"}, ConfigError, "/no/such"),
    ):
        with fails_with(error, says):
            find_weights_source(**(names | changes), settings=Config())  # type: ignore[arg-type]
    engine = RemoteSGLangEngine()
    for given, error, names_ in (
        ({}, ValueError, ["experiment_name and trial_name"]),
        ({"model": "some/model", "kind": "vllm"}, ValueError, ["'vllm'", "embedded or sglang"]),
        ({"url": "http://8.8.8.8:30000"}, ConfigError, []),
        ({"url": "ftp://127.0.0.1"}, ConfigError, []),
    ):
        with fails_with(error, *names_):
            engine.initialize(**given)  # type: ignore[arg-type]
