"""Settings under AReaL's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from any_agent.config import Config, load_config
from any_agent.config.foreign_settings import ALIASES, NEUTRAL, SCHEDULER
from any_agent.config.script import GRPOConfig
from any_agent.errors import ConfigError
from tests.support.errors import fails_with

GIVEN = {"rollout.openai.mode": "subproc", "rollout.openai.subproc_max_workers": 3}
GIVEN |= {"rollout.group_size": 4, "experiment_name": "007", "rollout.max_head_offpolicyness": 1}
GIVEN |= {"actor.path": "a/b", "actor.optimizer.lr": 1e-3, "gconfig.max_new_tokens": 9}
GIVEN |= {"actor.optimizer.lr_scheduler_type": "cosine", "actor.optimizer.min_lr_ratio": 0.1}
GIVEN |= {"actor.ppo_n_minibatches": 4}


def value_of(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def written(folder: Path, data: Any) -> Path:
    path = folder / "theirs.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        node = out
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return out


@pytest.mark.parametrize("source", ["file", "environment", "command line"])
def test_areals_names_are_taken_from_every_source(tmp_path: Path, source: str) -> None:
    path, environ, overrides = None, {}, []
    if source == "file":
        path = written(tmp_path, nested(GIVEN))
    elif source == "environment":
        names = {key: key.replace(".", "__").upper() for key in GIVEN}
        environ = {f"ANY_AGENT_{name}": str(GIVEN[key]) for key, name in names.items()}
    else:
        overrides = [f"{key}={value}" for key, value in GIVEN.items()]
    config = load_config(path, overrides, environ)
    assert {key: value_of(config, ALIASES[key]) for key in GIVEN} == GIVEN
    # What is shown and handed on has our names alone.
    assert load_config(written(tmp_path, config.dump()), environ={}) == config


def test_a_nearer_source_wins_under_whichever_name(tmp_path: Path) -> None:
    path = written(tmp_path, {"sessions": {"group_size": 2}, "actor": {"path": "file"}})
    environ = {"ANY_AGENT_ROLLOUT__GROUP_SIZE": "4"}
    assert load_config(path, [], environ).sessions.group_size == 4
    config = load_config(path, ["sessions.group_size=8", "model.path=line"], environ)
    assert (config.sessions.group_size, config.model.path) == (8, "line")


def test_two_names_of_one_setting_must_agree(tmp_path: Path) -> None:
    both = {
        "sessions": {"group_size": 4},
        "rollout": {"group_size": 4},
        "gconfig": {"n_samples": 4},
    }
    assert load_config(written(tmp_path, both), [], {}).sessions.group_size == 4
    for name in ("rollout.group_size", "gconfig.n_samples"):
        section, leaf = name.split(".")
        other = written(tmp_path, {**both, section: {leaf: 8}})
        with fails_with(ConfigError, f"{name}=8"):
            load_config(other, [], {})
        with fails_with(ConfigError, f"{name}=8", "sessions.group_size=4"):
            load_config(None, ["sessions.group_size=4", f"{name}=8"], {})
    assert load_config(None, ["seed=1", "seed=2"], {}).train.seed == 2


def test_a_scripts_own_settings_keep_their_names() -> None:
    class Own(GRPOConfig):
        seed: int = 5
        actor: dict[str, str] = Field(default_factory=dict)

    config = load_config(None, ["seed=7", "actor={path: x}"], {}, kind=Own)
    assert (config.seed, config.train.seed, config.model.path) == (7, 0, "")
    assert config.actor == {"path": "x"}


def test_dumped_episodes_may_have_a_tokenizer_of_their_own(tmp_path: Path) -> None:
    text = 'rollout:\n  dump_to_file: true\n  fileroot: "/path/to/logs"\n'
    text += '  tokenizer_path: "model/tokenizer" # for texts\n'
    rollout = load_config(written(tmp_path, text), [], {}).rollout
    assert (rollout.dump_to_file, rollout.fileroot) == (True, Path("/path/to/logs"))
    assert rollout.tokenizer_path == "model/tokenizer"
    assert load_config(environ={}).rollout.tokenizer_path == ""


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"tokenizer_path": "a/b/", "actor": {"path": "a/b"}})
    assert load_config(path, [], {}).model.path == "a/b"
    with fails_with(ConfigError, "tokenizer_path=a/b/", "model.path=c"):
        load_config(path, ["model.path=c"], {})


@pytest.mark.parametrize(
    ("given", "eta"),
    [
        (["async_training=false"], 0),
        (["async_training=true"], 2),
        (["async_training=true", "rollout.eta=1"], 1),
        (["async_training=false", "rollout.max_head_offpolicyness=0"], 0),
        (["rollout.eta=0"], 0),
        ([], 2),
    ],
)
def test_training_is_asynchronous_where_tokens_may_be_old(given: list[str], eta: int) -> None:
    config = load_config(None, given, {}, kind=GRPOConfig)
    assert (config.rollout.eta, config.async_training) == (eta, eta > 0)


@pytest.mark.parametrize(
    "given",
    [
        ["async_training=false", "rollout.eta=2"],
        ["async_training=true", "rollout.eta=0"],
        ["async_training=false", "rollout.max_head_offpolicyness=4"],
    ],
)
def test_a_contradiction_about_old_tokens_is_refused(tmp_path: Path, given: list[str]) -> None:
    with fails_with(ConfigError, "async_training", "rollout.eta"):
        load_config(None, given, {})
    first, second = given
    name, _, value = first.partition("=")
    with fails_with(ConfigError, "async_training", "rollout.eta"):
        load_config(written(tmp_path, {name: value == "true"}), [second], {})
    with fails_with(ConfigError, "async_training", "true or false"):
        load_config(None, ["async_training=maybe"], {})


def test_the_scheduler_is_the_launchers_business() -> None:
    assert load_config(None, ["scheduler.type=local"], {}) == load_config(environ={})
    for kind, said in (
        ("slurm", "any_agent.launcher.slurm any_agent_grpo.py"),
        ("ray", "scheduler.type=ray"),
    ):
        with fails_with(ConfigError, said):
            load_config(None, [f"scheduler.type={kind}"], {})
    token = SCHEDULER.set("slurm")
    try:
        assert load_config(None, ["scheduler.type=slurm"], {}) == load_config(environ={})
        with fails_with(ConfigError, "slurm"):
            load_config(None, ["scheduler.type=local"], {})
    finally:
        SCHEDULER.reset(token)
    with fails_with(ConfigError, "scheduler.endpoint"):
        load_config(None, ["scheduler.endpoint=x"], {})


def test_settings_that_change_nothing_are_taken(tmp_path: Path) -> None:
    neutral = {name: accepted[0] for name, (accepted, _) in NEUTRAL.items() if accepted}
    neutral |= dict.fromkeys(("critic", "ref", "reward_model", "teacher"))
    path = written(tmp_path, nested({**neutral, "actor.kl_ctl": 0.0, "train.kl_coef": 0}))
    assert load_config(path, [], {}) == load_config(environ={})
    given = [f"{name}={value}" for name, value in neutral.items() if value is not None]
    assert load_config(None, given, {}) == load_config(environ={})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"critic": {"path": "x"}}, "critic.path"),
        ({"ref": {"path": "x"}}, "train.kl_coef"),
        ({"reward_model": {"path": "x"}}, "reward_model.path"),
        ({"teacher": {}}, "teacher"),
        ({"actor": {"kl_ctl": 0.1}}, "train.kl_reward_coef"),
        ({"actor": {"gae_lambda": 0.95}}, "actor.gae_lambda"),
        ({"actor": {"optimizer": {"warmup_steps_proportion": 0.1}}}, "train.warmup_steps"),
        ({"actor": {"use_sapo_loss": True}}, "train.preset"),
        ({"actor": {"importance_sampling_level": "sequence"}}, "train.preset=gspo"),
        ({"actor": {"use_lora": True}}, "train.lora.rank, train.lora.alpha"),
        ({"rollout": {"use_lora": True}}, "rollout.use_lora"),
        ({"train": {"lora": {"modules_to_save": ["x"]}}}, "train.lora.modules_to_save"),
        ({"gconfig": {"greedy": True}}, "gconfig.greedy"),
    ],
)
def test_what_the_trainer_cannot_do_is_refused_by_name(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(written(tmp_path, given), [], {}, kind=GRPOConfig)
    assert said in raised.value.message and "did you mean" not in raised.value.message


def test_what_one_source_overrides_is_that_setting_alone(tmp_path: Path) -> None:
    """Sections that an anchor of YAML makes alike are not one section."""
    text = "train_dataset: &data {path: train.jsonl}\nvalid_dataset: *data\n"
    config = load_config(written(tmp_path, text), ["valid_dataset.path=val.jsonl"], {})
    assert (config.train_dataset.path, config.valid_dataset.path) == ("train.jsonl", "val.jsonl")
