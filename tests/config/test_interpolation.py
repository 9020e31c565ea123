"""``${actor.path}`` in files of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.config import Config, load_config
from any_agent.config.script import GRPOConfig
from any_agent.errors import ConfigError
from tests.support.errors import fails_with


def load(folder: Path, text: str, *overrides: str, **environ: str) -> Config:
    path = folder / "my.yaml"
    path.write_text(text)
    return load_config(path, overrides, environ, kind=GRPOConfig)


THEIRS = """
experiment_name: mine
trial_name: t1
actor: {path: a/b}
tokenizer_path: ${actor.path}
rollout: {tokenizer_path: "${tokenizer_path}", fileroot: "${ experiment_name }"}
"""


def test_what_changes_a_setting_changes_what_names_it(tmp_path: Path) -> None:
    config = load(tmp_path, THEIRS)
    assert (config.model.path, str(config.rollout.tokenizer_path)) == ("a/b", "a/b")
    assert str(config.rollout.fileroot) == "mine"
    config = load(tmp_path, THEIRS, "actor.path=c", ANY_AGENT_EXPERIMENT="yours")
    assert (config.model.path, str(config.rollout.tokenizer_path)) == ("c", "c")
    assert (config.experiment, str(config.rollout.fileroot)) == ("yours", "yours")


def test_sections_numbers_and_lists_can_be_referred_to(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "train_dataset: {path: x, split: s}\nvalid_dataset: ${train_dataset}\n"
        "train: {seed: 7, steps: '${train.seed}'}\nmodel: {name: m, policy_names: ['${trial}']}\n"
        "trial: other\n",
        "train_dataset.split=t",
    )
    assert (config.valid_dataset.path, config.train_dataset.split) == ("x", "t")
    assert config.train.steps == 7
    assert list(config.model.policy_names) == ["other"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trial: ${x.y}", "trial: ${x.y} names nothing in FILE"),
        ("trial: ${experiment.y}\nexperiment: e", "${experiment.y} names nothing in FILE"),
        ("trial: ${trial}", "trial -> trial is a circle in FILE"),
        ("trial: ${user}\nuser: ${trial}", "user -> trial -> user is a circle in FILE"),
        ("train: ${model}\nmodel: {path: '${train}'}", "is a circle in FILE"),
        ("root: ${user}/runs\nuser: me", "root: "),
        ("root: '${.user}'\nuser: me", "root: "),
        ("model: {path: '${oc.env:MODEL}'}", "ANY_AGENT_MODEL__PATH"),
        ("cluster: {sbatch: ['--x=${HOME}/y']}", "cluster.sbatch"),
    ],
)
def test_references_that_lead_nowhere_are_refused_by_name(
    tmp_path: Path, text: str, says: str
) -> None:
    with fails_with(ConfigError, says.replace("FILE", str(tmp_path / "my.yaml"))):
        load(tmp_path, text)


def test_only_files_name_others(tmp_path: Path) -> None:
    with fails_with(ConfigError, "model.path"):
        load(tmp_path, "", "actor.path=${root}")
    with fails_with(ConfigError, "ANY_AGENT_TRIAL"):
        load(tmp_path, "", ANY_AGENT_TRIAL="${oc.env:ME}")
    key = "a-key-with-${x}-of-thirty-two-letters"
    config = load(tmp_path, "", ANY_AGENT_SERVER__ADMIN_KEY=key)
    assert config.secrets() == [key]
