from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from any_agent.config import Config, known_keys, load_config, load_resolved
from any_agent.config.foreign_settings import ALIASES, CALLED_HERE, NOT_HERE, SPECIAL
from any_agent.config.script import GRPOConfig, load_expr_config
from any_agent.errors import ConfigError
from any_agent.runtime.import_string import import_string
from tests.support.errors import fails_with


class OwnConfig(GRPOConfig):
    workflow: str = ""
    max_turns: int = 8


def test_a_script_reads_its_file_and_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("experiment: exp\ntrain: {lr: 1.0e-3}\nmodel: {path: a/b}\n")
    config, read = load_expr_config(["--config", str(path), "train.steps=3"], GRPOConfig)
    assert isinstance(config, GRPOConfig) and isinstance(config, Config)
    assert read == str(path)
    assert (config.train.lr, config.train.steps) == (1e-3, 3)
    assert config.tokenizer_path == "a/b"
    assert (config.experiment_name, config.trial_name) == ("exp", "trial-1")
    again, _ = load_expr_config(["train.py", f"--config={path}", "train.steps=3"], GRPOConfig)
    assert again == config
    assert load_expr_config(["train.steps=3"], GRPOConfig)[1] == ""


def test_the_commands_short_options_are_settings_of_a_script(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("trial: of-the-file\n")
    given = ["train.steps=3", "--trial", "t", "train.lr=1e-3", f"--config={path}", "--model=/m"]
    config, read = load_expr_config([*given, "server.ranks=3"], GRPOConfig)
    assert (config.trial, config.model.path, read) == ("t", "/m", str(path))
    assert (config.train.steps, config.train.lr, config.server.ranks) == (3, 1e-3, 3)
    assert load_expr_config(["--trial", "t", "trial=u"], GRPOConfig)[0].trial == "u"


def test_gconfig_is_how_train_sessions_are_sampled() -> None:
    arguments = ["sampling.temperature=0.7", "sampling.max_new_tokens=12"]
    gconfig = load_expr_config(arguments, GRPOConfig)[0].gconfig
    assert (gconfig.temperature, gconfig.max_new_tokens, gconfig.top_p) == (0.7, 12, 1.0)


def test_own_fields_come_from_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("max_turns: 3\n")
    config, _ = load_expr_config(["--config", str(path), "workflow=agents.Mine"], OwnConfig)
    assert (config.workflow, config.max_turns) == ("agents.Mine", 3)
    monkeypatch.setenv("ANY_AGENT_MAX_TURNS", "4")
    assert load_expr_config([], OwnConfig)[0].max_turns == 4
    # As text, also where it looks like a number.
    assert load_expr_config(["workflow=007"], OwnConfig)[0].workflow == "007"
    with fails_with(ConfigError, "max_turn:", "max_turns"):
        load_expr_config(["max_turn=4"], OwnConfig)
    with fails_with(ConfigError, "max_turns"):
        load_expr_config(["max_turns=4"], GRPOConfig)


def test_other_processes_read_what_own_fields_are_not_in(tmp_path: Path) -> None:
    config, _ = load_expr_config(["max_turns=3", "train.lr=1e-3"], OwnConfig)
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(config.dump()))
    plain = load_config(None, ["train.lr=1e-3"], {})
    assert load_resolved(path, {}) == config.base() == plain
    assert type(config.base()) is Config
    config, _ = load_expr_config(["server.admin_key=0123456789"], OwnConfig)
    key = config.base().server.admin_key
    assert key is not None and key.get_secret_value() == "0123456789"


def test_what_is_no_class_of_settings_is_refused() -> None:
    @dataclass
    class Decorated(GRPOConfig):
        pass

    with fails_with(ConfigError, "@dataclass", "Decorated"):
        load_expr_config([], Decorated)
    with fails_with(ConfigError, "GRPOConfig"):
        load_expr_config([], dict)  # type: ignore[type-var]


def test_arguments_that_are_no_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with fails_with(ConfigError, "'--steps'", "key=value"):
        load_expr_config(["--steps", "3"], GRPOConfig)
    with fails_with(ConfigError, "nowhere.yaml"):
        load_expr_config(["--config", "nowhere.yaml"], GRPOConfig)
    with pytest.raises(SystemExit):
        load_expr_config(["--help"], GRPOConfig)
    assert "key=value" in capsys.readouterr().out


OURS = {
    "actor.eps_clip": "train.eps_low",
    "actor.behav_imp_weight_cap": "train.is_cap; train.is_mode=mask",
    "actor.overlong_tokens": "train.overlong_buffer",
    "train.epsilon_high": "train.eps_high",
    "train.beta": "train.kl_coef",
    "train.loss_type": "train.preset",
    "train.loss_agg_mode": "train.aggregation",
    "train_dataset.batch_size": "rollout.batch_size",
    "train.learning_rate": "train.lr",
    "train.optimizer.lr": "train.lr",
    "total_steps": "train.steps",
    "actor.lora_rank": "train.lora.rank",
    "actor.lora_alpha": "train.lora.alpha",
    "actor.target_modules": "train.lora.target_modules",
    "train.lora.r": "train.lora.rank",
    "train.num_epochs": "train.epochs",
    "total_train_epochs": "train.epochs",
}


def test_names_of_other_trainers_are_answered_with_ours() -> None:
    for name, ours in OURS.items():
        with fails_with(ConfigError, name, ours):
            load_expr_config([f"{name}=1"], GRPOConfig)


def test_what_nothing_corresponds_to_is_told_to_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "allocation_mode: d1\nactor: {path: x, backend: y, odd: 1}\ncritic: {path: z}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_expr_config(["--config", str(path)], GRPOConfig)
    for line in (
        "unknown key allocation_mode: leave it out: server.ranks is",
        "unknown key actor.backend: leave it out",
        "unknown key actor.odd: leave it out, nothing here corresponds to it",
        "unknown key critic.path: leave it out: no algorithm here learns values",
    ):
        assert line in raised.value.message
    assert "actor.path" not in raised.value.message


def test_every_name_that_is_answered_with_is_a_setting() -> None:
    known = set(known_keys())
    foreign = [*ALIASES, *CALLED_HERE, *NOT_HERE, *SPECIAL]
    assert not set(foreign) & known and len(foreign) == len(set(foreign))
    assert set(ALIASES.values()) <= known
    for ours in CALLED_HERE.values():
        named = re.findall(r"[a-z_]+(?:\.[a-z0-9_]+)+|^[a-z_]+$", ours)
        assert named and set(named) <= known


def test_the_mode_of_agents_outside_is_answered_with_what_they_need() -> None:
    with fails_with(ConfigError, "dataset", "workflow"):
        load_expr_config(["rollout.agent.mode=online"], GRPOConfig)


def test_a_workflow_is_named_in_the_script_or_declared() -> None:
    given = ["workflow=my_agent.MathAgent", "eval_workflow=my_agent.Other"]
    config, _ = load_expr_config(given, GRPOConfig)
    assert (config.workflow, config.eval_workflow) == ("my_agent.MathAgent", "my_agent.Other")
    assert load_expr_config([], GRPOConfig)[0].workflow == ""
    with fails_with(ConfigError, "unknown key workflow"):
        load_config(None, given, {})


def test_what_settings_name_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "found_here.py").write_text("class Agent: ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(sys.path)
    for _ in range(2):
        load_expr_config([], GRPOConfig)
        assert sys.path == [*before, str(tmp_path)]
    assert import_string("found_here.Agent").__name__ == "Agent"
