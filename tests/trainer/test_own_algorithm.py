"""An estimator and a loss of a user: those of docs/how-to/extend.md, by hand and in a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from any_agent.config import TrainConfig
from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from tests.support.extend_page import run_code_of
from tests.support.trainer.episodes import session
from tests.support.trainer.loop import Lab, config_of
from trainer.advantage import SessionRewards, estimate_advantages
from trainer.loss import LOSSES, LossConfig, LossInputs

SETTINGS = ("train.advantage_estimator=median", "train.loss=imitate")


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names of the document's module, which registers them."""
    return run_code_of("Add an advantage estimator or a loss")


def test_the_documents_own_estimator_gives_the_advantages_by_hand(page: dict[str, Any]) -> None:
    config = TrainConfig(advantage_estimator="median")  # type: ignore[call-arg]
    one, none = SessionRewards([1.0], [True]), SessionRewards([9.0], [False])
    first = [one, SessionRewards([0.0], [True]), SessionRewards([0.2, 9.0], [True, False]), none]
    four, equal, alone = estimate_advantages([first, [one, one], [one]], config)
    assert four.advantages == ((0.8,), (-0.2,), (0.0, 0.0), (0.0,))
    assert four.scores == (1.0, 0.0, 0.2, None) and not four.zero_variance
    assert equal.zero_variance and equal.advantages == ((0.0,), (0.0,))
    assert alone.zero_variance and alone.advantages == ((0.0,),)


def test_the_documents_own_loss_gives_the_gradient_by_hand(page: dict[str, Any]) -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-1.1, -9.0, 0.0], dtype=torch.float64)
    advantages = torch.tensor([2.0, 1.0, -1.0], dtype=torch.float64)
    inputs = LossInputs(behaviour, advantages)
    loss, stats = LOSSES.find("imitate")(
        logprobs, inputs, total_tokens=6, config=LossConfig("imitate")
    )
    weights = [math.exp(0.1), 5.0, math.exp(-1.0)]
    assert float(loss.detach()) == pytest.approx(-(2 * weights[0] + weights[1]) / 6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2 * weights[0] / 6, -weights[1] / 6, 0.0])
    assert stats.tokens == 3 and stats.weight == pytest.approx(sum(weights))


def test_a_step_trains_with_an_estimator_and_a_loss_of_the_user(
    page: dict[str, Any], settings: list[str], tiny_model_dir: Path
) -> None:
    group = [session("good", 1.0, logprob=-3.0), session("bad", 0.0, logprob=-8.0)]
    lab = Lab(config_of(settings, *SETTINGS, "train.steps=1"), [group])
    lab.trainer.train()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 2:4].log_softmax(-1)
    sampled = [float(logits[0, 8]), float(logits[1, 9])]
    # The scores are 1 and 0: the bad session has a negative advantage, and no part in the loss.
    expected = -sum(0.5 * min(math.exp(logprob + 3.0), 5.0) for logprob in sampled) / 4
    (line,) = lab.metrics
    assert line["loss"] == pytest.approx(expected, rel=1e-4)
    start = model.state_dict().values()
    assert not all(torch.equal(a, b) for a, b in zip(lab.weights(), start, strict=False))


def test_an_unknown_name_ends_the_trainer_at_its_start(tmp_path: Path) -> None:
    for setting in ("train.advantage_estimator=gppo", "train.loss=gppo"):
        with fails_with(ConfigError, setting):
            Lab(config_of([f"root={tmp_path}"], setting), [])
