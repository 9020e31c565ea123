"""A preset fills in what is not given, and contradictions are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from any_agent.config import TrainConfig, load_config
from any_agent.config.presets import PRESETS
from any_agent.errors import ConfigError
from any_agent.launcher.trial import require_no_dataset_settings
from tests.support.errors import fails_with
from trainer.from_config import loss_config, require_algorithm
from trainer.loss import needs_clipped_ratio, needs_sequence_ratio, needs_sequence_weight

KNOBS = ("advantage_estimator", "loss", "normalize_std", "aggregation", "eps_low", "eps_high")


def train(*given: str) -> TrainConfig:
    return load_config(None, [f"train.{one}" for one in given], {}).train


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("grpo", ("grpo", "grpo", "group", "token", 0.2, 0.28)),
        ("dapo", ("grpo", "grpo", "group", "token", 0.2, 0.28)),
        ("dr_grpo", ("grpo", "grpo", "none", "constant", 0.2, 0.2)),
        ("gspo", ("grpo", "gspo", "group", "turn", 3e-4, 4e-4)),
        ("gmpo", ("grpo", "gmpo", "group", "turn", 0.4, 0.4)),
        ("dppo", ("grpo", "dppo", "group", "token", 0.15, 0.15)),
        ("m2po", ("grpo", "reinforce", "group", "token", None, None)),
        ("cispo", ("grpo", "cispo", "group", "token", 1.0, 4.0)),
        ("sapo", ("grpo", "sapo", "group", "session", None, None)),
        ("vespo", ("grpo", "vespo", "group", "token", None, None)),
        ("rloo", ("rloo", "reinforce", "none", "constant", None, None)),
        ("opo", ("opo", "reinforce", "none", "constant", None, None)),
        ("maxrl", ("maxrl", "grpo", "none", "token", 0.2, 0.28)),
        ("reinforce_pp", ("reinforce_pp", "grpo", "batch", "token", 0.2, 0.2)),
        ("reinforce_pp_baseline", ("reinforce_pp_baseline", "grpo", "batch", "token", 0.2, 0.2)),
    ],
)
def test_a_preset_sets_the_algorithms_knobs(preset: str, expected: tuple[object, ...]) -> None:
    config = train(f"preset={preset}")
    assert tuple(getattr(config, name) for name in KNOBS) == expected
    require_algorithm(config)
    loss = loss_config(config)
    assert needs_sequence_ratio(loss) is (preset == "gspo")
    assert needs_clipped_ratio(loss) is (preset == "gmpo")
    assert needs_sequence_weight(loss) is (preset in ("gspo", "gmpo"))
    # A process that reads the written settings comes to the same.
    assert TrainConfig(**config.model_dump()) == config


def test_every_preset_can_be_named() -> None:
    assert set(PRESETS) == set(get_args(TrainConfig.model_fields["preset"].annotation))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["preset=dapo", "eps_high=0.3"], {"eps_low": 0.2, "eps_high": 0.3}),
        (["preset=dr_grpo", "aggregation=session"], {"constant_length": None}),
        (["preset=dr_grpo", "constant_length=9"], {"constant_length": 9, "eps_high": 0.2}),
        (["preset=dr_grpo", "loss=gspo"], {"eps_high": 4e-4, "is_level": "sequence"}),
        (["preset=sapo", "tau_neg=2"], {"tau_pos": 1.0, "tau_neg": 2.0}),
        (["preset=dr_grpo", "loss=sapo"], {"eps_high": None, "tau_pos": 1.0}),
        (["preset=vespo", "k_neg=1"], {"k_pos": 2.0, "k_neg": 1.0, "lambda_neg": 2.0}),
        (["loss=mine.own", "lambda_pos=1"], {"lambda_pos": 1.0, "k_pos": None, "eps_low": 0.2}),
        (["dual_clip=3"], {"dual_clip": 3.0}),
        (["preset=m2po"], {"second_moment": 0.04}),
        (["preset=m2po", "second_moment=0.1", "loss=grpo"], {"second_moment": 0.1}),
        (["preset=m2po", "loss=gspo"], {"second_moment": None}),
        (["is_cap=2", "is_floor=0.5"], {"is_floor": 0.5}),
        (["preset=rloo", "kl_reward_coef=0.05"], {"kl_coef": 0.0, "kl_estimator": None}),
        (["preset=rloo", "loss=grpo"], {"eps_low": 0.2, "eps_high": 0.28}),
        (["preset=dapo", "advantage_estimator=rloo"], {"normalize_std": "none"}),
        (["preset=gspo", "is_level=token"], {"is_level": "token", "eps_low": 3e-4}),
        (["loss=mine.own", "eps_low=0.1"], {"loss": "mine.own", "eps_low": 0.1, "eps_high": 0.28}),
        (["kl_coef=0.01"], {"kl_estimator": "k3"}),
        (["preset=reinforce_pp", "kl_coef=0.01"], {"kl_estimator": "k2"}),
        (["overlong_length=4000"], {"overlong_buffer": 800, "overlong_penalty": 1.0}),
        (["overlong_length=100", "overlong_buffer=100"], {"overlong_buffer": 100}),
        ([], {"dynamic_sampling": "refill", "teacher_kind": None}),
        (
            ["teacher=x", "teacher_coef=1"],
            {"dynamic_sampling": "keep", "teacher_kind": "reverse", "reward_coef": 1.0},
        ),
        (
            ["teacher=x", "teacher_coef=1", "dynamic_sampling=drop", "kl_reward_coef=0.1"],
            {"dynamic_sampling": "drop"},
        ),
        (["reward_coef=0", "kl_coef=1", "kl_estimator=k2"], {"dynamic_sampling": "keep"}),
    ],
)
def test_every_setting_can_be_set_by_itself(given: list[str], expected: dict[str, Any]) -> None:
    config = train(*given)
    assert {name: getattr(config, name) for name in expected} == expected
    assert TrainConfig(**config.model_dump()) == config


CONTRADICTIONS = {
    "preset=ppo": "train.preset: ",
    "preset=rloo eps_low=0.2": "train.eps_low",
    "preset=sapo eps_high=0.2": "train.eps_high",
    "preset=gspo tau_neg=2": "train.tau_neg",
    "preset=gspo is_level=token is_mode=mask": "train.is_level=token",
    "preset=maxrl normalize_std=batch": "train.normalize_std",
    "preset=maxrl kl_reward_coef=0.1": "train.kl_reward_coef",
    "preset=maxrl overlong_length=100": "train.overlong_length",
    "preset=opo normalize_std=group": "train.normalize_std",
    "preset=reinforce_pp group_by=role": "advantage_estimator=reinforce_pp",
    "preset=reinforce_pp_baseline group_by=role kl_reward_coef=0.1": "train.kl_reward_coef",
    "preset=gspo k_pos=1": "train.k_pos",
    "preset=cispo dual_clip=7": "train.dual_clip",
    "dual_clip=1.2": "train.dual_clip=1.2",
    "is_floor=6": "train.is_floor=6",
    "preset=vespo is_level=sequence": "train.is_level=sequence",
    "kl_coef=0.1 kl_reward_coef=0.1": "train.kl_coef and train.kl_reward_coef",
    "reference_model=x": "train.reference_model",
    "teacher=x": "train.teacher_coef is 0",
    "teacher_coef=1": "set train.teacher",
    "teacher_coef=-1 teacher=x": "train.teacher_coef",
    "teacher_kind=forward": "train.teacher_kind=forward",
    "teacher=x teacher_coef=1 teacher_kind=both": "train.teacher_kind",
    "reward_coef=0": "train.reward_coef=0",
    "reward_coef=0 kl_coef=1 kl_estimator=k1": "train.reward_coef=0",
    "reward_coef=0 teacher=x teacher_coef=1 kl_reward_coef=1": "train.kl_reward_coef",
    "reward_coef=0 teacher=x teacher_coef=1 overlong_length=9": "train.overlong_length",
    "reward_coef=0 teacher=x teacher_coef=1 dynamic_sampling=drop": "train.dynamic_sampling=drop",
    "kl_reward_coef=0.1 kl_estimator=k1": "train.kl_estimator=k1",
    "kl_estimator=k2": "train.kl_estimator=k2",
    "preset=rloo normalize_std=group": "normalize_std=group",
    "preset=reinforce_pp normalize_std=group": "normalize_std=group",
    "constant_length=5": "train.constant_length",
    "overlong_buffer=5": "train.overlong_buffer",
    "overlong_penalty=0.5": "train.overlong_penalty",
    "overlong_length=4 overlong_buffer=5": "train.overlong_buffer=5",
    "overlong_length=8192": "train.overlong_length=8192",
    "rejection_k2=0": "train.rejection_k2",
    "preset=gmpo second_moment=0.1": "train.second_moment",
    "entropy_coef=-0.1": "train.entropy_coef",
    "kl_coef=inf": "train.kl_coef",
    "eps_high=inf": "train.eps_high",
    "kl_coef=-1": "train.kl_coef",
    "eps_low=1.5": "train.eps_low",
    "aggregation=mean": "train.aggregation",
}


def test_settings_that_contradict_the_algorithm_are_refused_by_name() -> None:
    for given, says in CONTRADICTIONS.items():
        with fails_with(ConfigError, says):
            train(*given.split())


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        *(([], [f"preset={preset}"]) for preset in PRESETS),
        ([], ["loss=sapo"]),
        ([], ["advantage_estimator=rloo"]),
        (["kl_coef=0.1"], ["kl_coef=0"]),
        ([], ["teacher=x", "teacher_coef=1"]),
        (["teacher=x", "teacher_coef=1"], ["teacher=", "teacher_coef=0"]),
        (["preset=dr_grpo"], ["aggregation=token"]),
        (["overlong_length=2000"], ["overlong_length=300"]),
    ],
)
def test_saved_settings_keep_none_that_the_preset_chose(
    saved: list[str], given: list[str], tmp_path: Path
) -> None:
    """A run's config.yaml with another setting on top is what both settings alone are."""
    file = tmp_path / "config.yaml"
    before = load_config(None, [f"train.{one}" for one in saved], {})
    file.write_text(yaml.safe_dump(before.dump()), encoding="utf-8")
    names = {one.partition("=")[0] for one in given}
    both = [one for one in saved if one.partition("=")[0] not in names] + given
    assert load_config(file, [f"train.{one}" for one in given], {}).train == train(*both)


def test_rows_of_several_outputs_have_neither_one_role_nor_one_end() -> None:
    concat = "rollout.agent.export_style=concat"
    for setting in ("train.group_by=role", "train.mask_truncated=true"):
        with fails_with(ConfigError, concat, setting):
            load_config(None, [setting, concat], {})
    assert load_config(None, ["train.group_by=role"], {}).train.group_by == "role"


def test_items_cannot_rest_where_no_group_is_left_out_or_the_order_is_fixed() -> None:
    for other in (
        "train.dynamic_sampling=keep",
        "train.preset=reinforce_pp",
        "rollout.deterministic=true",
    ):
        more = ["rollout.eta=0", "engine.max_running_requests=1"]
        with fails_with(ConfigError, "rollout.sampling=learnable"):
            load_config(None, ["rollout.sampling=learnable", other, *more], {})
    with fails_with(ConfigError, "rollout.sampling=learnable chooses"):
        require_no_dataset_settings(load_config(None, ["rollout.sampling=learnable"], {}))
