from __future__ import annotations

import math

import pytest
import torch

from any_agent.config import TrainConfig
from any_agent.errors import ConfigError
from tests.support.errors import fails_with
from trainer.from_config import loss_config
from trainer.loss import LOSSES, LossConfig, LossInputs, LossStats

GRPO = LOSSES.find("grpo")


def one(
    logprob: float, prox: float | None, mu: float, advantage: float
) -> tuple[float, float, LossStats]:
    """Loss, gradient by the log-probability, statistics of a single token."""
    lp = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    given = {"behaviour": mu, "advantages": advantage, "proximal": prox}
    inputs = LossInputs(
        **{k: torch.tensor([v], dtype=torch.float64) for k, v in given.items() if v is not None}
    )
    loss, stats = GRPO(lp, inputs, total_tokens=1, config=LossConfig())
    loss.backward()
    assert lp.grad is not None
    return float(loss.detach()), float(lp.grad), stats


@pytest.mark.parametrize(
    ("mu", "weight", "capped", "mismatch"),
    [
        (-1.0, 1.0, 0, 0.0),
        (-1.5, math.exp(0.5), 0, math.exp(0.5) - 1.5),
        (-9.0, 5.0, 1, math.exp(8) - 9),
        # A token that was sampled for certain, as by a model that has collapsed.
        (0.0, math.exp(-1), 0, math.exp(-1)),
        (-1e5, 5.0, 1, None),
    ],
)
def test_a_token_on_policy_weighs_its_importance_which_is_capped(
    mu: float, weight: float, capped: int, mismatch: float | None
) -> None:
    """The mismatch of engine and trainer is estimated by k3."""
    loss, slope, stats = one(logprob=-1.0, prox=None, mu=mu, advantage=2.0)
    assert (loss, slope) == pytest.approx((-2 * weight, -2 * weight))
    assert (stats.is_capped, stats.means()["ratio"]) == (capped, 1.0)
    assert math.isfinite(stats.mismatch) and "mismatch_fresh" not in stats.means()
    assert mismatch is None or stats.mismatch == pytest.approx(mismatch)


@pytest.mark.parametrize("error", [0.0, 0.3])
def test_the_mismatch_of_fresh_tokens_is_measured_without_old_tokens(error: float) -> None:
    logprobs, mu = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -1.0 - error, -1.0])
    inputs = LossInputs(mu, torch.zeros(3), fresh=torch.tensor([0.0, 1.0, 1.0]))
    means = GRPO(logprobs, inputs, total_tokens=3, config=LossConfig())[1].means()
    assert means["mismatch"] > 0.2
    expected = (math.exp(error) - error - 1) / 2
    assert means["mismatch_fresh"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("which", ["logprobs", "behaviour", "advantages", "proximal"])
def test_an_input_that_is_not_finite_raises_with_its_place(which: str) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        tensors = {k: torch.zeros(3) for k in ("logprobs", "behaviour", "advantages", "proximal")}
        tensors[which][1] = bad
        logprobs = tensors.pop("logprobs")
        how = {"config": LossConfig(), "place": lambda k: f"session x, token {k}"}
        with fails_with(FloatingPointError, "session x, token 1", "1 of 3"):
            GRPO(logprobs, LossInputs(**tensors), total_tokens=3, **how)


def test_a_ratio_that_overflows_raises_instead_of_a_nan_gradient() -> None:
    with fails_with(FloatingPointError, "trained token 0"):
        one(logprob=0.0, prox=-800.0, mu=-1.0, advantage=1.0)


def test_wrong_shapes_and_token_counts_are_refused() -> None:
    z = torch.zeros(2)
    with fails_with(ValueError, "shape"):
        GRPO(z, LossInputs(z[:1], z), total_tokens=2, config=LossConfig())
    with fails_with(ValueError, "N = 1"):
        GRPO(z, LossInputs(z, z), total_tokens=1, config=LossConfig())
    with fails_with(ValueError, "N = 0"):
        GRPO(z[:0], LossInputs(z[:0], z[:0]), total_tokens=0, config=LossConfig())


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "sapo", "vespo", "reinforce"])
def test_a_loss_named_alone_has_the_constants_that_settings_give_it(name: str) -> None:
    assert LossConfig(name) == loss_config(TrainConfig(loss=name))  # type: ignore[call-arg]
    # One given by itself leaves the others.
    assert LossConfig(name, is_level="token").eps_high == LossConfig(name).eps_high
    assert LossConfig(name, eps_low=0.7).eps_low == 0.7


@pytest.mark.parametrize(
    "wrong",
    [
        *({"eps_low": -0.1}, {"eps_low": 1.1}, {"eps_high": -1.0}, {"is_cap": 0}),
        *({"is_floor": -0.1}, {"is_floor": 5.1}, {"dual_clip": 1.28}),
        *({"top_entropy": 0}, {"top_entropy": 1.1}),
        *({"k_pos": -1}, {"k_neg": -1}, {"lambda_pos": 0}, {"lambda_neg": 0}),
    ],
)
def test_constants_of_a_loss_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        LossConfig(**wrong)
