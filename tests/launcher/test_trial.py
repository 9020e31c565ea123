"""A trial that was started before: its settings go on, and its newest weights are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from any_agent.auth.key_store import create_key
from any_agent.config import Config, load_config
from any_agent.errors import ConfigError
from any_agent.launcher import trial
from any_agent.launcher.trial import (
    ServedModel,
    TrialWeights,
    find_weights,
    fleet_before,
    latest_weights,
    newest_weights,
    require_grader,
    require_same_ranks,
    resolve_config,
    trial_dir,
)
from any_agent.rundir.checksums import damaged_folders, write_manifest
from any_agent.rundir.fleet import Fleet, save_fleet
from tests.support.errors import fails_with


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANY_AGENT_SERVER__ADMIN_KEY", raising=False)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return f"root={tmp_path / 'runs'}"


def start(*settings: str) -> Config:
    """What a start leaves behind."""
    config = load_config(None, settings, environ={})
    run = trial_dir(config)
    run.create()
    (run.path / "config.yaml").write_text(yaml.safe_dump(config.dump()))
    return config


def test_without_a_file_the_saved_settings_go_on_and_overrides_win(root: str) -> None:
    start(root, "model.path=/models/a", "train.steps=3", "train.lr=0.5")
    config = resolve_config(None, [root, "train.steps=9"])
    assert (config.model.path, config.train.steps, config.train.lr) == ("/models/a", 9, 0.5)
    # Another trial is not concerned.
    assert resolve_config(None, [root, "trial=other"]).train.lr == Config().train.lr
    # The start of the service decides which ranks are added or drained.
    assert resolve_config(None, [root, "server.ranks=3"]).server.ranks == 3


def test_with_a_file_of_settings_the_file_counts(root: str, tmp_path: Path) -> None:
    start(root, "model.path=/models/a", "train.steps=3", "train.lr=0.5")
    path = tmp_path / "my.yaml"
    path.write_text("train: {steps: 4}\n")
    config = resolve_config(str(path), [root])
    assert (config.train.steps, config.train.lr) == (4, Config().train.lr)
    # The trial's model is no matter of choice.
    assert config.model.path == "/models/a"


def test_a_trial_with_another_model_is_refused(root: str, tmp_path: Path) -> None:
    start(root, "model.path=/models/a")
    path = tmp_path / "my.yaml"
    path.write_text("model: {path: /models/b}\n")
    for file, overrides in ((None, [root, "model.path=/models/b"]), (str(path), [root])):
        with fails_with(ConfigError, "from /models/a", "not from /models/b"):
            resolve_config(file, overrides)
    assert resolve_config(None, [root, "model.path=/models/a"]).model.path == "/models/a"


def test_a_trial_that_was_open_to_others_goes_on(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its admin key is not among the saved settings."""
    start(root, "model.path=/m", "server.host=0.0.0.0", "server.admin_key=first-admin-key")
    with fails_with(ConfigError, "server.admin_key"):
        resolve_config(None, [root])
    config = resolve_config(None, [root, "server.admin_key=another-admin-key"])
    assert config.server.host == "0.0.0.0"
    monkeypatch.setenv("ANY_AGENT_SERVER__ADMIN_KEY", "a-third-admin-key")
    assert resolve_config(None, [root]).server.host == "0.0.0.0"


def test_an_admin_key_of_the_trial_opens_other_addresses(root: str) -> None:
    config = resolve_config(None, [root])
    create_key(trial_dir(config).keys, "tenant", tenant="alice")
    with fails_with(ConfigError, "any-agent keys create"):
        resolve_config(None, [root, "server.host=0.0.0.0"])
    create_key(trial_dir(config).keys, "admin")
    assert resolve_config(None, [root, "server.host=0.0.0.0"]).server.host == "0.0.0.0"


def test_a_job_keeps_the_ranks_that_have_sessions(root: str) -> None:
    """Their places on nodes follow from their number."""
    config = start(root, "model.path=/m", "server.ranks=2")
    require_same_ranks(config, None)
    require_same_ranks(config, fleet_before(config))
    fleet = Fleet.of(2).with_state(2, "serving").with_state(0, "draining")
    save_fleet(trial_dir(config).fleet, fleet)
    with fails_with(ConfigError, "ranks 0, 1, 2,", "to 2 "):
        require_same_ranks(config, fleet_before(config))


def test_a_folder_of_an_older_layout_is_refused_by_name(root: str) -> None:
    """Before its settings are read, of which this version may not know all."""
    config = start(root, "model.path=/m")
    run = trial_dir(config)
    (run.path / "config.yaml").write_text("engine: {url: http://old}\n")
    (run.path / "format").unlink()
    with fails_with(ConfigError, "format '1'", "reads 2"):
        resolve_config(None, [root])
    (run.path / "format").write_text("3\n")
    with fails_with(ConfigError, "format '3'", "reads 2"):
        resolve_config(None, [root])
    with fails_with(ConfigError, "format '3'", "reads 2"):
        run.create()


FILES = {
    "config.json": "{}",
    "model.safetensors": "weights",
    "trainer/state.json": json.dumps({"state": {"version": 5, "consumed": []}}),
}


@pytest.fixture
def config(root: str) -> Config:
    return load_config(None, [root], environ={})


@pytest.fixture
def checkpoint(config: Config) -> Path:
    """A whole one of step 20; its weights were version 5, and the run went on to version 9."""
    run = trial_dir(config)
    run.create()
    run.state.write_text(json.dumps({"highest_version": 9, "step": 24, "versions": {"9": 24}}))
    path = run.checkpoints / "step-00000020"
    (path / "trainer").mkdir(parents=True)
    for name, text in FILES.items():
        (path / name).write_text(text)
    sizes = {name: len(text) for name, text in FILES.items()}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": sizes}))
    (run.checkpoints / "latest").write_text("step-00000020\n")
    return path


def test_a_broken_checkpoint_is_passed_over(config: Config, checkpoint: Path) -> None:
    latest = checkpoint.parent / "latest"
    for name in ("", "step-00000019", "../checkpoints/step-00000020"):
        latest.write_text(name)
        assert latest_weights(config) is None, name
    latest.write_text(checkpoint.name)
    for file in [checkpoint / name for name in (*FILES, "manifest.json")]:
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        assert latest_weights(config) is None, f"{file} is truncated"
        file.unlink()
        assert latest_weights(config) is None, f"{file} is gone"
        file.write_bytes(whole)
    found = latest_weights(config)
    assert found is not None
    assert (found.path, found.step, found.version) == (checkpoint, 20, 5)


def publish(config: Config, *versions: int) -> Path:
    """What the trainer renames into place; the folder of the last one."""
    for version in versions:
        path = trial_dir(config).weights / f"v{version:08d}"
        path.mkdir(parents=True)
    return path


def test_the_last_published_version_counts_unless_a_checkpoint_is_newer(
    config: Config, checkpoint: Path
) -> None:
    publish(config, 4)
    assert newest_weights(config) == latest_weights(config)
    newest = publish(config, 8, 9)
    for name in (".partial-v00000010", ".partial-removed-v00000011", "v12", "other"):
        (newest.parent / name).mkdir()
    assert newest_weights(config) == TrialWeights(newest, 9)
    longest = publish(config, 123_456_789)
    assert newest_weights(config) == TrialWeights(longest, 123_456_789)


def test_published_weights_count_before_the_first_checkpoint(config: Config) -> None:
    assert latest_weights(config) is None
    assert newest_weights(config) is None
    path = publish(config, 1, 2)
    assert newest_weights(config) == TrialWeights(path, 2)


def damaged_at_equal_size(folder: Path) -> None:
    write_manifest(folder)
    path = next(p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json")
    path.write_bytes(bytes(path.stat().st_size))


def test_an_engine_starts_with_the_newest_undamaged_weights(
    config: Config, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "CHECK_INTERVAL", 0.0)
    write_manifest(checkpoint)
    for version in (8, 9, 10):
        folder = publish(config, version)
        (folder / "model.safetensors").write_bytes(b"weights")
        write_manifest(folder)
    damaged_at_equal_size(folder)
    assert ServedModel(config, None).weights() == (str(folder.with_name("v00000009")), 9)
    for version in (8, 9):
        damaged_at_equal_size(folder.with_name(f"v0000000{version}"))
    assert ServedModel(config, None).weights() == (str(checkpoint), 5)
    assert damaged_folders(folder.parent) == [
        "damaged-v00000008",
        "damaged-v00000009",
        "damaged-v00000010",
    ]
    # Without any whole weights nothing else is served in their place.
    damaged_at_equal_size(checkpoint)
    with fails_with(ConfigError, trial_dir(config).path, "no weights"):
        ServedModel(config, None).weights()


def test_weights_that_were_asked_for_by_name_are_not_replaced(
    config: Config, checkpoint: Path
) -> None:
    damaged_at_equal_size(checkpoint)
    for wanted in ({"step": 20}, {"version": 5}, {}):
        with fails_with(ConfigError, "step-00000020", "damaged"):
            find_weights(config, **wanted)
    assert checkpoint.is_dir()


def test_a_wrong_grader_is_found_before_anything_starts() -> None:
    grade = ("sessions.late_reward=grade", "sessions.grader=")
    for wrong in ("no_such_module.grade", "json.no_such_function"):
        with fails_with(ConfigError, f"sessions.grader={wrong}"):
            require_grader(load_config(None, [grade[0], grade[1] + wrong], environ={}))
    require_grader(load_config(None, [grade[0], f"{grade[1]}json.dumps"], environ={}))
    require_grader(load_config(None, [], environ={}))


def test_a_file_of_weights_that_is_cut_off_is_named(tmp_path: Path) -> None:
    """With its size and the one that it must have, before any part loads it."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(4)
    file = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    file.write_bytes(whole)
    trial.check_model(str(tmp_path))
    for size in (0, 5, 20, len(whole) - 1):
        file.write_bytes(whole[:size])
        with fails_with(ConfigError, file, f"it has {size} bytes"):
            trial.check_model(str(tmp_path))
    file.write_bytes(whole[:-1])
    with fails_with(ConfigError, file, f"must have {len(whole)} bytes"):
        trial.check_model(str(tmp_path))
