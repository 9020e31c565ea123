"""Settings become the trainer's parts: the learning rate of each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from any_agent.config import TrainConfig, load_config
from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from trainer.from_config import (
    dump_tokenizer,
    learning_rate,
    require_algorithm,
    workflow_executor,
)


def train_of(**settings: Any) -> TrainConfig:
    return TrainConfig(**{"lr": 1e-3, "steps": 10} | settings)


def rates(c: TrainConfig, steps: int = 10) -> list[float]:
    return [learning_rate(c, step, steps) for step in range(1, steps + 1)]


def own_loss(*_: Any, **__: Any) -> Any:
    raise AssertionError("it is only named")


def test_a_bound_of_rows_that_a_loss_of_yours_would_ignore_is_refused() -> None:
    name = f"{__name__}.own_loss"
    require_algorithm(train_of(loss=name))
    for bound in ("rejection_k1", "rejection_k2", "rejection_k3"):
        with fails_with(ConfigError, f"train.{bound}", f"train.loss={name}", "PolicyLoss"):
            require_algorithm(train_of(loss=name, **{bound: 1.0}))
        require_algorithm(train_of(**{bound: 1.0}))


def test_a_constant_rate_is_the_setting_itself_after_its_warm_up() -> None:
    assert rates(train_of()) == [1e-3] * 10
    risen = [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3]
    assert rates(train_of(warmup_steps=3))[:5] == pytest.approx(risen, abs=1e-18)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_rate_falls_as_that_of_transformers(kind: str, warmup: int) -> None:
    """The rates are equal after the warm-up: theirs begins at 0, ours with the first share."""
    make = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    theirs = make[kind](optimizer, warmup, 10)
    expected = []
    for _ in range(10):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    got = rates(train_of(lr_schedule=kind, warmup_steps=warmup))
    assert got[warmup:] == pytest.approx(expected[warmup:], rel=1e-12)
    assert got[warmup] == 1e-3 and got[-1] < 0.2e-3
    least = train_of(lr_schedule=kind, min_lr_ratio=0.1)
    assert learning_rate(least, 1, 10) == 1e-3
    assert learning_rate(least, 6, 10) == pytest.approx(0.55e-3)
    # More steps than the schedule has, as after a restart with fewer.
    for step in (11, 99):
        assert learning_rate(least, step, 10) == pytest.approx(0.1e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["train.warmup_steps=100"], "train.steps=100"),
        (["train.warmup_steps=-1"], "train.warmup_steps"),
        (["train.min_lr_ratio=1.5", "train.lr_schedule=linear"], "train.min_lr_ratio"),
        (["train.min_lr_ratio=0.1"], "train.lr_schedule to linear or cosine"),
        (["train.lr_schedule=step"], "train.lr_schedule"),
        (["train.minibatches=65"], "rollout.batch_size=64"),
        (["train.minibatches=0"], "train.minibatches"),
        (["train.epochs_per_batch=0"], "train.epochs_per_batch"),
        (["train.reference_model=x"], "train.kl_reward_coef"),
        (["train.kl_coef=-0.1"], "train.kl_coef"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    given: list[str], said: str
) -> None:
    with fails_with(ConfigError, said):
        load_config(None, given, {})


def test_a_deterministic_run_gives_its_seed_to_its_workflows(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("trainer.from_config.WorkflowExecutor", lambda *_, **named: given | named)
    settings = (f"model.path={tiny_model_dir}", "train.seed=7", "rollout.eta=0")
    config = load_config(overrides=[*settings, "rollout.deterministic=true"])
    made: Any = workflow_executor(config, ["http://127.0.0.1:1"])
    assert made["seed"] == 7


def test_dumped_episodes_are_decoded_by_the_tokenizer_of_the_settings(tiny_model_dir: Path) -> None:
    models = object()

    def decoder(*settings: str) -> object:
        return dump_tokenizer(load_config(None, settings, {}), models)

    dumps, named = "rollout.dump_to_file=true", f"rollout.tokenizer_path={tiny_model_dir}"
    assert decoder() is decoder(dumps) is decoder(named) is models
    other = decoder(dumps, named)
    assert other is not models and other.decode([1])  # type: ignore[attr-defined]
    with fails_with(ConfigError, "nowhere"):
        decoder(dumps, "rollout.tokenizer_path=/nowhere")
