"""The same numbers as TRL 1.16's GRPO, where the conventions coincide.

They do with ``loss_type="dapo"`` (sum over trained tokens divided by their number over all
micro-batches and ranks; ``"bnpo"`` is the same for one micro-batch), ``scale_rewards="group"`` (std
with ddof 1, + 1e-4), ``epsilon`` / ``epsilon_high``, ``beta`` (k3, outside the importance weight)
and vLLM's importance sampling correction as ``token_truncate`` with a maximum of C and no minimum.

TRL's own methods run, on a trainer made without its constructor: only generation, rewards and the
reference's forward pass are stubbed. Its rewards are one per completion, ours one per interaction:
the comparison uses sessions of one interaction. Its tool mask is our loss mask inside the output.
TRL pads prompts on the left and knows one temperature. Its fused head computes in float32, hence
1e-6 where the model takes part; formulas alone agree to 1e-12.

TRL is imported by the tests that run: it brings pandas, datasets and torch's compiler, and every
process that collects tests would import it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.peers.trl_trainer import Completions, trl_trainer
from tests.support.trainer.policies import VOCAB, assert_same, gradients, random_rows, small_policy
from trainer.advantage import SessionRewards, group_advantages
from trainer.loss import LOSSES, LossConfig, LossInputs
from trainer.packing import (
    Row,
    concat_padded_tensors,
    count_trained,
    micro_batches,
    with_training_signal,
)
from trainer.policy import Policy

GROUP = 4
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Sample:
    """One completion: prompt, output with a tool's tokens inside, behaviour logprobs, reward."""

    prompt: list[int]
    output: list[int]
    own: list[int]
    behaviour: list[float]
    reward: float


def random_samples(seed: int, groups: int = 2) -> list[Sample]:
    g = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(1, VOCAB, (n,), generator=g).tolist()

    out = []
    for _ in range(groups):
        prompt = ids(int(torch.randint(2, 9, (), generator=g)))
        for _ in range(GROUP):
            n = int(torch.randint(3, 12, (), generator=g))
            own = (torch.rand(n, generator=g) < 0.7).int().tolist()
            own[0] = own[-1] = 1
            behaviour = (-4.0 - 2 * torch.rand(n, generator=g, dtype=torch.float64)).tolist()
            out.append(Sample(prompt, ids(n), own, behaviour, float(torch.rand((), generator=g))))
    return out


def made(policy: Policy, samples: list[Sample], **changes: Any) -> Any:
    """TRL's trainer on a copy of the policy's model."""
    from trl.trainer.utils import add_fused_lm_head

    model = copy.deepcopy(policy.model)
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    given = Completions(
        prompts=[s.prompt for s in samples],
        outputs=[s.output for s in samples],
        own=[s.own for s in samples],
        behaviour=[s.behaviour for s in samples],
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float64),
    )
    return trl_trainer(model.train(), given, group=GROUP, each=len(samples), **changes)


def trl_scored(trainer: Any, samples: list[Sample]) -> dict[str, Tensor]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # its lists of behaviour logprobs become tensors here
    try:
        scored = trainer._generate_and_score_completions([{"prompt": ""} for _ in samples])
    finally:
        torch.set_default_dtype(previous)
    return dict(scored)


def our_rows(samples: list[Sample]) -> list[Row]:
    groups = [
        [SessionRewards([s.reward], [True]) for s in samples[k : k + GROUP]]
        for k in range(0, len(samples), GROUP)
    ]
    advantages = [a for got in group_advantages(groups) for (a,) in got.advantages]
    rows = []
    for sample, advantage in zip(samples, advantages, strict=True):
        n, m = len(sample.prompt), len(sample.output)
        mask = torch.tensor([0] * n + sample.own, dtype=torch.int32)
        row = {
            "input_ids": torch.tensor(sample.prompt + sample.output, dtype=torch.int32),
            "loss_mask": mask,
            "logprobs": torch.tensor([0.0] * n + sample.behaviour, dtype=torch.float64) * mask,
            "versions": torch.tensor([-1] * n + [0] * m, dtype=torch.int32),
            "attention_mask": torch.ones(n + m, dtype=torch.bool),
            "rewards": torch.tensor(sample.reward),
        }
        row = with_training_signal(row, advantage=advantage, temperature=TEMPERATURE)
        # float32 is what travels; float64 shows that the formulas agree, not only their rounding.
        row["advantages"] = torch.tensor(advantage, dtype=torch.float64)
        row["temperatures"] = torch.tensor(TEMPERATURE, dtype=torch.float64)
        rows.append(row)
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_advantages(seed: int) -> None:
    samples = random_samples(seed)
    scored = trl_scored(made(small_policy(), samples), samples)
    got = concat_padded_tensors(our_rows(samples))["advantages"]
    torch.testing.assert_close(got, scored["advantages"], atol=1e-9, rtol=0)


def test_advantages_without_division() -> None:
    samples = random_samples(3)
    scored = trl_scored(made(small_policy(), samples, scale_rewards="none"), samples)
    groups = [[SessionRewards([s.reward], [True]) for s in samples[k : k + 4]] for k in (0, 4)]
    got = [a for g in group_advantages(groups, normalize_std="none") for (a,) in g.advantages]
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), scored["advantages"])


def loss_and_gradients_equal_trl(
    seed: int = 0, loss_type: str = "dapo", cap: float = 5.0, budget: int = 10_000
) -> None:
    samples = random_samples(seed)
    policy = small_policy(head_chunk=7)
    trainer = made(policy, samples, loss_type=loss_type, vllm_importance_sampling_clip_max=cap)
    scored = trl_scored(trainer, samples)
    expected = trainer._compute_loss(trainer.model, scored)
    expected.backward()

    rows = our_rows(samples)
    n = count_trained(rows)
    stats = policy.accumulate(micro_batches(rows, budget), n, LossConfig(is_cap=cap))
    assert stats.loss == pytest.approx(float(expected.detach()), abs=1e-6)
    expected_gradients = {
        name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None
    }
    assert_same(gradients(policy), expected_gradients, atol=1e-6)
    (entropy,) = trainer._metrics["train"]["entropy"]
    assert stats.means()["entropy"] == pytest.approx(entropy, abs=1e-6)
    (weight,) = trainer._metrics["train"]["sampling/importance_sampling_ratio/mean"]
    assert stats.means()["weight"] == pytest.approx(weight, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_loss_and_gradients(seed: int, loss_type: str) -> None:
    loss_and_gradients_equal_trl(seed, loss_type)


@pytest.mark.parametrize("cap", [0.5, 2.0])
def test_the_cap_of_the_importance_weight(cap: float) -> None:
    loss_and_gradients_equal_trl(4, cap=cap)


def test_micro_batches_as_well() -> None:
    loss_and_gradients_equal_trl(5, budget=40)


@pytest.mark.parametrize("seed", range(3))
def test_off_the_proximal_policy(seed: int) -> None:
    """The clip at work: pi_prox is not pi_theta. Here the log-probabilities are given."""
    g = torch.Generator().manual_seed(seed)
    shape = (6, 9)

    def near(x: Tensor, by: float) -> Tensor:
        return x + by * torch.randn(shape, generator=g, dtype=torch.float64)

    now = -3 * torch.rand(shape, generator=g, dtype=torch.float64)
    old, mu = near(now, 0.4), near(now, 1.2)
    mask = (torch.rand(shape, generator=g) < 0.7).int()
    mask[:, 0] = 1
    advantages = torch.randn(6, generator=g, dtype=torch.float64)

    trainer = made(small_policy(), random_samples(0), beta=0.0)
    theirs = now.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (theirs, now * 0, None)
    expected = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": torch.ones(6, 1),
            "prompt_mask": torch.ones(6, 1),
            "completion_ids": torch.ones(shape),
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "importance_sampling_ratio": torch.exp((old - mu) * mask).clamp(max=5.0),
            "num_items_in_batch": mask.sum(),
        },
    )
    expected.backward()

    ours = now.clone().requires_grad_()
    own = mask.bool()
    inputs = LossInputs(mu[own], advantages[:, None].expand(shape)[own], proximal=old[own])
    loss, stats = LOSSES.find("grpo")(
        ours[own], inputs, total_tokens=int(mask.sum()), config=LossConfig()
    )
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=0)
    metrics, means = trainer._metrics["train"], stats.means()
    assert means["clipped_low"] > 0 and means["clipped_high"] > 0
    assert means["clipped_low"] == pytest.approx(metrics["clip_ratio/low_mean"][0])
    assert means["clipped_high"] == pytest.approx(metrics["clip_ratio/high_mean"][0])


def test_logprobs_are_selective_log_softmax_of_the_shifted_logits() -> None:
    from trl.trainer.utils import selective_log_softmax

    policy = small_policy()
    batch = concat_padded_tensors(random_rows(1))
    ids = batch["input_ids"].long()
    with torch.no_grad():
        got = policy.token_logprobs(batch, TEMPERATURE)
        logits = policy.model(input_ids=ids).logits[:, :-1]
    table = selective_log_softmax(logits / TEMPERATURE, ids[:, 1:])
    expected = table[batch["loss_mask"][:, 1:].bool()]
    torch.testing.assert_close(got.logprobs, expected, atol=1e-12, rtol=0)
