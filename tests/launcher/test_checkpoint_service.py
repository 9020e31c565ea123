"""Models that a trial has kept, by name; what cannot be served is told before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from any_agent.config import Config, load_config
from any_agent.errors import ConfigError
from any_agent.launcher import trial
from any_agent.launcher.checkpoint_service import StoredCheckpoint, find_kept, served
from any_agent.launcher.trial import find_weights, kept_weights, trial_dir
from any_agent.rundir.checksums import write_manifest
from any_agent.rundir.layout import RunDir
from tests.support.errors import fails_with


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANY_AGENT_SERVER__ADMIN_KEY", raising=False)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of the model that the trial began with."""
    path = tmp_path / "base"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def run(tmp_path: Path, base: Path) -> RunDir:
    config = load_config(
        None,
        [
            *(f"root={tmp_path / 'runs'}", "user=me", "experiment=exp", "trial=one"),
            *(f"model.path={base}", "server.host=0.0.0.0", "model.enable_thinking=false"),
        ],
        environ={},
    )
    run = trial_dir(config)
    run.create()
    (run.path / "config.yaml").write_text(yaml.safe_dump(config.dump()))
    return run


def checkpoint(run: RunDir, step: int, version: int) -> Path:
    """One that is whole, as far as it is looked at, and the latest."""
    path = run.checkpoints / f"step-{step:08d}"
    (path / "trainer").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "trainer" / "state.json").write_text(json.dumps({"state": {"version": version}}))
    write_manifest(path)
    (run.checkpoints / "latest").write_text(f"{path.name}\n")
    return path


def find(run: RunDir, name: str, *more: str) -> StoredCheckpoint:
    return find_kept(name, [f"root={run.path.parents[2]}", "user=me", *more])


def test_a_checkpoint_is_found_by_its_name_or_as_the_latest(run: RunDir, base: Path) -> None:
    first, path = checkpoint(run, 20, 21), checkpoint(run, 40, 42)
    found = find(run, "exp/one", "server.ranks=1", "sampling.temperature=0.5")
    assert (found.name, found.weights.path, found.weights.version) == ("exp/one@42", path, 42)
    assert found.config.model.enable_thinking is False, "its settings are the trial's"
    assert (found.config.server.ranks, found.config.sampling.temperature) == (1, 0.5)
    assert find(run, "exp/one@21").weights.path == first
    assert find(run, "exp/one@0").weights.path == base
    published = run.weights / "v00000045"
    published.mkdir(parents=True)
    (published / "config.json").write_text("{}")
    write_manifest(published)
    assert find(run, "exp/one@45").weights.path == published
    (run.checkpoints / "step-00000030.tmp").mkdir()
    assert {0, 21, 42} <= set(kept_weights(_config(run)))
    (base / "config.json").unlink()
    with fails_with(ConfigError, "config.json", base):
        find(run, "exp/one@0")


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(run: RunDir) -> None:
    with fails_with(ConfigError, "no complete checkpoint", "versions 0 "):
        find(run, "exp/one")
    checkpoint(run, 20, 21)
    (checkpoint(run, 40, 42) / "config.json").write_text("{ }")
    with fails_with(ConfigError, "exp/one ", "version 42", "versions 0, 21 "):
        find(run, "exp/one@42")
    with fails_with(ConfigError, "exp/two", "exp/one (user me)"):
        find(run, "exp/two")
    for name in ("exp", "a/b/c", "exp/one@x", ""):
        with fails_with(ConfigError, repr(name), "experiment/trial@version"):
            find(run, name)


def test_a_models_folder_is_served_as_it_is(base: Path, tmp_path: Path) -> None:
    found = find_kept(str(base), [f"root={tmp_path}"])
    assert (found.name, found.weights.version) == (str(base), 0)
    other = tmp_path / "other" / "base"
    other.mkdir(parents=True)
    (other / "config.json").write_text("{}")
    assert found.config.trial.startswith("base-")
    assert find_kept(str(other)).config.trial != found.config.trial


def test_a_checkpoint_that_goes_meanwhile_hides_no_other(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(run, 20, 21)
    checkpoint(run, 30, 31)
    problem = trial.checkpoint_problem

    def going(path: Path) -> str | None:
        found = problem(path)
        if path.name == "step-00000020":
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(trial, "checkpoint_problem", going)
    assert find_weights(_config(run), version=31).version == 31


def _config(run: RunDir) -> Config:
    return load_config(run.path / "config.yaml", environ={})


def test_engines_elsewhere_are_refused_as_they_have_weights_of_their_own(
    run: RunDir, tmp_path: Path
) -> None:
    checkpoint(run, 1, 1)
    elsewhere = ["engine.urls=[http://10.0.0.1:3]", "server.ranks=1"]
    with (
        fails_with(ConfigError, "engine.urls"),
        served(find(run, "exp/one", *elsewhere), tmp_path / "kept", print),
    ):
        pass


def test_the_light_install_serves_nothing(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(run, 1, 1)
    monkeypatch.setattr("any_agent.launcher.checkpoint_service.find_spec", lambda name: None)
    with (
        fails_with(ConfigError, "torch", "any-agent-rl[serve]"),
        served(find(run, "exp/one"), tmp_path / "kept", print),
    ):
        pass
    assert not (tmp_path / "kept").exists()
