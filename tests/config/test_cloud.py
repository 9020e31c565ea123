"""The file of a cloud: what is refused, by name, and what a run's settings become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from any_agent.config.cloud import CloudConfig, load_cloud
from any_agent.config.load import settings_of
from any_agent.errors import ConfigError, InvalidRequest

KEY = {"ANY_AGENT_SERVER__ADMIN_KEY": "the-operators-own-key"}
PLAIN = {
    "models": {"tiny": {"model": {"path": "/m"}, "server.ranks": 1, "train.lr": 0.1}},
    "presets": {"grpo": {"train": {"lr": 0.2, "steps": 9}}},
    "default": {"model": "tiny", "preset": "grpo"},
}


def cloud(tmp_path: Path, environ: dict[str, str] | None = None, **more: Any) -> CloudConfig:
    path = tmp_path / "cloud.yaml"
    path.write_text(yaml.safe_dump({**PLAIN, **more}))
    return load_cloud(path, KEY if environ is None else environ)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"admin_key": "in-the-file"}, "must not hold admin_key"),
        ({"default": {"model": "none", "preset": "grpo"}}, "default.model=none is none of tiny"),
        ({"settable": {"train.speed": None}}, "train.speed, which is no setting"),
        ({"settable": {"server.port": None}}, "server.port, which the cloud sets itself"),
        ({"models": {}}, "models"),
        ({"presets": {"grpo": {"train.lr": -1}}}, "the model tiny with the preset grpo"),
        ({"models": {"tiny": {"server.journal_dir": "/j"}}}, "server.journal_dir"),
        ({"places": 0}, "places"),
        ({"plases": 1}, "unknown key plases"),
        ({"hold": 1000}, "hold"),
    ],
)
def test_a_file_that_cannot_work_is_refused_by_name(
    tmp_path: Path, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        cloud(tmp_path, **more)
    assert words in raised.value.message


@pytest.mark.parametrize("key", ["", "short", "sk-v1.0.abc.def", "with a space in it"])
def test_an_operators_key_that_cannot_be_used_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        cloud(tmp_path, {"ANY_AGENT_SERVER__ADMIN_KEY": key})
    assert key == "" or key not in raised.value.message


def test_a_preset_counts_before_its_model_and_an_accounts_own_before_both(tmp_path: Path) -> None:
    config = cloud(tmp_path)
    own = {"user": "alice", "server.port": 81}
    settings = settings_of(config.run_settings("tiny", "grpo", {"train.steps": 3}, own))
    assert (settings.train.lr, settings.train.steps) == (0.2, 3)
    assert (settings.model.path, settings.server.ranks) == ("/m", 1)
    assert (settings.user, settings.server.port) == ("alice", 81)


def test_no_setting_of_an_account_brings_a_module_a_path_or_a_reference(tmp_path: Path) -> None:
    config = cloud(tmp_path)
    assert len(config.settable) > 8
    for name in config.settable:
        for value in ("os.system", "/etc/passwd", "${model.path}", ["a"], {"a": 1}):
            with pytest.raises(InvalidRequest, match="takes a"):
                config.run_settings("tiny", "grpo", {name: value}, {})
    for name in ("model.path", "plugins", "train", "server.host"):
        with pytest.raises(InvalidRequest, match="cannot be set"):
            config.run_settings("tiny", "grpo", {name: 1}, {})
