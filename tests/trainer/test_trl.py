"""The same numbers as TRL 1.16, where the conventions coincide: losses, gradients, advantages.

TRL's own methods run, on trainers made without their constructors: only generation, rewards and
(for the formulas) the forward pass are replaced. Formulas alone agree to 1e-12, or 1e-6 where the
weights of tokens take part, which are float32; TRL's fused head computes in float32, hence 1e-6
where the model takes part.

Where they differ:
- TRL's rewards are one per completion, ours one per interaction: the comparison uses sessions of
  one interaction. Its tool mask is our loss mask inside the output.
- Its prompts are padded on the left, and it knows one temperature.
- Its importance weight of a sequence is the product over the tokens, ours the geometric mean.
- A sequence's ratio with weights of single tokens: GSPO's token form, here, keeps each token's own
  weight; there the gradient has their mean.
- Its entropy bonus is always the mean over tokens; ours has the mean of the other terms.
- Its KL term is k3, by default multiplied by the ratio (``use_bias_correction_kl``): here that is
  k3_unbiased, whose ratio is the token's, also beside the ratio of a sequence.
- Its mask of sequences that are off policy (``off_policy_mask_threshold``) and its VESPO bound each
  log ratio by 20, and the product by 1e-8 from below. There a masked weight (``token_mask``) is
  1e-8 in VESPO's product, here 0: the row is not trained on.
- ``bnpo`` is our mean over tokens, for one pass; ``luspo`` is GSPO with another constant.
- ``RLOOTrainer`` clips the product of a sequence's ratios: another value, and the same gradient
  on policy. Its KL in the reward compares the trainer's log-probabilities with the reference's,
  ours those that were recorded.
- With ``top_entropy_quantile`` its entropy bonus, too, has the chosen tokens alone.
- ``use_adaptive_entropy``, ``mask_truncated_completions``, ``sync_ref_model`` and
  ``multi_objective_aggregation`` have no counterpart.

TRL is imported by the tests that run: it takes seconds, in every process that collects tests.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from any_agent.config import TrainConfig
from benchmarks.peers.trl_trainer import Completions, trl_trainer
from tests.support.trainer.policies import VOCAB, assert_same, gradients, row_of, small_policy
from trainer.advantage import SessionRewards, estimate_advantages, overlong_penalty
from trainer.batch import weighted
from trainer.from_config import loss_config
from trainer.kl_reward import found_divergences, less_divergence
from trainer.loss import LOSSES, LossConfig, LossInputs, clipped_log_ratio
from trainer.policy import Policy
from trainer.rows import Row, count_trained, with_training_signal

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
    given = Completions(
        prompts=[s.prompt for s in samples],
        outputs=[s.output for s in samples],
        own=[s.own for s in samples],
        behaviour=[s.behaviour for s in samples],
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float64),
    )
    return trl_trainer(fused(policy), given, group=GROUP, each=len(samples), **changes)


def fused(policy: Policy) -> Any:
    """A copy of the policy's model with TRL's head."""
    from trl.trainer.utils import add_fused_lm_head

    model = copy.deepcopy(policy.model)
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return model.train()


def assert_same_gradients(policy: Policy, trainer: Any, atol: float) -> None:
    named = trainer.model.named_parameters()
    theirs = {name: p.grad for name, p in named if p.grad is not None}
    assert_same(gradients(policy), theirs, atol=atol)


def trl_scored(trainer: Any, samples: list[Sample]) -> dict[str, Tensor]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # its lists of behaviour logprobs become tensors here
    try:
        scored = trainer._generate_and_score_completions([{"prompt": ""} for _ in samples])
    finally:
        torch.set_default_dtype(previous)
    return dict(scored)


def our_rows(
    samples: list[Sample],
    config: TrainConfig | None = None,
    reference: Callable[[Sequence[Row]], Sequence[Tensor]] | None = None,
) -> list[Row]:
    config = config or TrainConfig()  # type: ignore[call-arg]
    groups = [
        [SessionRewards([s.reward], [True]) for s in samples[k : k + GROUP]]
        for k in range(0, len(samples), GROUP)
    ]
    if config.kl_reward_coef:
        assert reference is not None
        found = iter(found_divergences(rows_with(samples, [0.0] * len(samples)), reference))
        beta = config.kl_reward_coef
        groups = [[less_divergence(r, [next(found)], beta) for r in group] for group in groups]
    estimates = estimate_advantages(groups, config)
    rows = rows_with(samples, [a for got in estimates for (a,) in got.advantages])
    return weighted([[row] for row in rows], config.aggregation, config.constant_length)


def rows_with(samples: list[Sample], advantages: list[float]) -> list[Row]:
    rows = []
    for sample, advantage in zip(samples, advantages, strict=True):
        behind = [0] * len(sample.prompt)
        logprobs = torch.tensor(behind + sample.behaviour, dtype=torch.float64)
        row = row_of(sample.prompt + sample.output, behind + sample.own, logprobs=logprobs)
        row = with_training_signal(row, advantage=advantage, temperature=TEMPERATURE)
        # float32 is what travels; float64 shows that the formulas agree, not only their rounding.
        row["advantages"] = torch.tensor(advantage, dtype=torch.float64)
        row["temperatures"] = torch.tensor(TEMPERATURE, dtype=torch.float64)
        rows.append(row)
    return rows


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
@pytest.mark.parametrize("seed", [0, 3])
def test_advantages_equal_those_of_trl(seed: int, scale: str) -> None:
    samples = random_samples(seed)
    scored = trl_scored(made(small_policy(), samples, scale_rewards=scale), samples)
    rows = our_rows(samples, TrainConfig(normalize_std=scale))
    got = torch.stack([row["advantages"] for row in rows])
    torch.testing.assert_close(got, scored["advantages"], atol=1e-9, rtol=0)


SHAPE = (6, 9)


class Tokens(NamedTuple):
    """Random inputs of a loss, [6, 9] or [6], float64; ``mask`` marks the trained tokens."""

    now: Tensor
    old: Tensor
    mu: Tensor
    reference: Tensor
    entropies: Tensor
    mask: Tensor
    advantages: Tensor


def random_tokens(seed: int, spread: float = 0.4) -> Tokens:
    g = torch.Generator().manual_seed(seed)

    def near(x: Tensor, by: float) -> Tensor:
        return x + by * torch.randn(SHAPE, generator=g, dtype=torch.float64)

    now = -3 * torch.rand(SHAPE, generator=g, dtype=torch.float64)
    mask = (torch.rand(SHAPE, generator=g) < 0.7).int()
    mask[:, 0] = 1
    return Tokens(
        now,
        near(now, spread),
        near(now, 1.2),
        near(now, 0.5),
        near(now, 0.1).abs(),
        mask,
        torch.randn(6, generator=g, dtype=torch.float64),
    )


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(-1) / mask.sum(-1)


class Case(NamedTuple):
    """Our constants and mean, and TRL's attributes for the same loss."""

    config: LossConfig
    aggregation: str
    theirs: dict[str, Any]
    spread: float = 0.4
    """How far pi_prox is from pi_theta."""
    mismatch: float = 1.0
    """The factor of the difference of pi_prox and mu."""


CISPO = LossConfig("cispo", eps_low=1.0, eps_high=4.0)
GSPO = LossConfig("gspo", eps_low=0.05, eps_high=0.08, is_level="sequence")
VESPO = {
    **{"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0},
    **{"vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
}
GSPO_THERE = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    **{"epsilon_low": 0.05, "epsilon_high": 0.08},
}
SAPO_THERE = {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
VESPO_THERE = {"loss_type": "vespo", **VESPO}
CASES = {
    "grpo": Case(LossConfig(), "session", {"loss_type": "grpo"}),
    "bnpo": Case(LossConfig(), "token", {"loss_type": "bnpo"}),
    "dapo": Case(LossConfig(), "token", {"loss_type": "dapo"}),
    "dr_grpo": Case(
        LossConfig(eps_high=0.2),
        "constant",
        {"loss_type": "dr_grpo", "epsilon_high": 0.2, "max_completion_length": 7},
    ),
    "cispo": Case(CISPO, "token", {"loss_type": "cispo", "epsilon_high": 5.0}, 1.5),
    "sapo": Case(LossConfig("sapo"), "session", SAPO_THERE),
    "gspo": Case(GSPO, "turn", GSPO_THERE, 0.3),
    "luspo": Case(GSPO, "constant", GSPO_THERE | {"loss_type": "luspo"}, 0.3),
    # TRL has no importance weights there, so mu is pi_prox.
    "gmpo": Case(
        LossConfig("gmpo", is_level="token"),
        *("turn", {"epsilon_low": 0.4, "epsilon_high": 0.4}, 0.5, 0.0),
    ),
    "vespo": Case(LossConfig("vespo"), "token", VESPO_THERE, 0.1, 0.3),
    "vespo, masked": Case(
        LossConfig("vespo", is_mode="mask", is_cap=1.5),
        "token",
        VESPO_THERE | {"vllm_importance_sampling_mode": "token_mask"},
        *(0.1, 0.3),
    ),
    "delta": Case(LossConfig(dual_clip=1.4), "token", {"delta": 1.4}),
    "delta of rows": Case(
        LossConfig("gspo", eps_low=0.05, eps_high=0.08, dual_clip=1.1),
        *("turn", GSPO_THERE | {"delta": 1.1}, 0.5),
    ),
    # Such a mismatch takes the policy away from rows of negative advantages.
    "off policy": Case(
        LossConfig(off_policy_threshold=0.1),
        *("token", {"off_policy_mask_threshold": 0.1}, 0.4, -1.0),
    ),
    "off policy, with kl": Case(
        LossConfig("sapo", off_policy_threshold=0.1, kl_coef=0.05),
        *("session", SAPO_THERE | {"off_policy_mask_threshold": 0.1, "beta": 0.05}, 0.4, -1.0),
    ),
    "high entropies": Case(
        LossConfig(top_entropy=0.4, kl_coef=0.05),
        *("session", {"loss_type": "grpo", "beta": 0.05, "top_entropy_quantile": 0.4}),
    ),
    "two bounds": Case(LossConfig(is_cap=1.5, is_floor=0.6), "token", {}),
    "masked beyond two bounds": Case(
        LossConfig(is_cap=1.5, is_floor=0.6, is_mode="mask"), "token", {}
    ),
    "unbiased kl": Case(
        LossConfig(kl_coef=0.05, kl_estimator="k3_unbiased"),
        *("session", {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": True}),
    ),
    "kl": Case(LossConfig(kl_coef=0.05), "session", {"loss_type": "grpo", "beta": 0.05}),
    "entropy": Case(
        LossConfig(entropy_coef=0.01),
        *("token", {"entropy_coef": 0.01, "_entropy_bonus_enabled": True}),
    ),
    "masked weights": Case(LossConfig(is_mode="mask", is_cap=1.5), "token", {}),
    "weights of rows": Case(LossConfig(is_level="sequence", is_cap=1.1), "token", {}),
    "masked weights of rows": Case(
        LossConfig(is_level="sequence", is_mode="mask", is_cap=1.1),
        *("session", {"loss_type": "grpo"}),
    ),
}
LENGTH = {"dr_grpo": 7, "luspo": 1}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_losses_over_given_logprobs_equal_those_of_trl(name: str, seed: int) -> None:
    """The same loss and gradient by the log-probabilities, and by the entropies."""
    from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer

    config, aggregation, theirs, spread, mismatch = CASES[name]
    x = random_tokens(seed, spread)
    x = x._replace(mu=x.old + mismatch * (x.mu - x.old))
    trainer = made(small_policy(), random_samples(0), **theirs)
    there = x.now.clone().requires_grad_()
    there_h = x.entropies.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (there, there_h, None)
    log_w = (x.old - x.mu) * x.mask
    if config.is_level == "sequence":
        log_w = row_mean(log_w, x.mask)[:, None]
    weight = torch.exp(log_w)
    beyond = (weight > config.is_cap) | (weight < config.is_floor)
    masks = config.is_mode == "mask"
    bounded = weight.clamp(config.is_floor, config.is_cap)
    weight = weight.masked_fill(beyond, 0.0) if masks else bounded
    inputs = {
        "prompt_ids": torch.ones(6, 1),
        "prompt_mask": torch.ones(6, 1),
        "completion_ids": torch.ones(SHAPE),
        "completion_mask": x.mask,
        "advantages": x.advantages,
        "old_per_token_logps": x.old,
        "ref_per_token_logps": x.reference,
        "importance_sampling_ratio": weight,
        "sampling_per_token_logps": x.mu,
        "num_items_in_batch": x.mask.sum(),
    }
    compute = GMPOTrainer if config.name == "gmpo" else type(trainer)
    expected = compute._compute_loss(trainer, trainer.model, inputs)
    expected.backward()

    own = x.mask.bool()
    rows: list[Row] = [{"loss_mask": mask} for mask in x.mask]
    rows = weighted([[row] for row in rows], aggregation, LENGTH.get(name))
    u = None
    if aggregation != "token":
        u = torch.stack([row["token_weights"] for row in rows])[:, None].expand(SHAPE)[own]
    here, here_h = x.now.clone().requires_grad_(), x.entropies.clone().requires_grad_()
    of_row = row_mean(x.now - x.old, x.mask), row_mean(x.old - x.mu, x.mask)
    least = torch.quantile(x.entropies[own], 1 - config.top_entropy)
    chosen = (x.entropies[own] >= least).double()
    clips = clipped_log_ratio(x.now, x.old, x.advantages[:, None].expand(SHAPE), config)
    clipped = row_mean(clips, x.mask)
    logs = (x.now - x.old + weight.log()).masked_fill(~own, 0.0)
    products = logs.sum(-1).clamp(max=20.0).exp()
    ratios, weights = (one[:, None].expand(SHAPE)[own] for one in of_row)
    given = LossInputs(
        x.mu[own],
        x.advantages[:, None].expand(SHAPE)[own],
        proximal=x.old[own],
        reference=x.reference[own] if config.kl_coef else None,
        token_weights=u,
        sequence_log_ratio=ratios,
        sequence_log_weight=weights,
        sequence_product=products[:, None].expand(SHAPE)[own],
        sequence_clipped_ratio=clipped[:, None].expand(SHAPE)[own],
        high_entropy=chosen if config.top_entropy < 1 else None,
    )
    loss, stats = LOSSES.find(config.name)(
        here[own], given, total_tokens=int(own.sum()), config=config, entropies=here_h[own]
    )
    loss.backward()
    # The weights of tokens are float32 in a row.
    close = {"atol": 1e-12 if u is None else 1e-6, "rtol": 0.0}
    torch.testing.assert_close(loss, expected, **close)
    torch.testing.assert_close(here.grad, there.grad, **close)
    if config.entropy_coef:
        torch.testing.assert_close(here_h.grad, there_h.grad, **close)
    if config.off_policy_threshold is None:
        counted = stats.is_masked if masks else stats.is_capped
        assert counted == float((beyond.expand(SHAPE) & own).sum())
    else:
        assert 0 < stats.is_masked < int(own.sum())
    if config.name == "vespo" and not masks:
        assert bool(((products > 0.3) & (products < 3)).any()), "one row is weighed"
    metrics, means = trainer._metrics["train"], stats.means()
    if config.kl_coef:
        assert means["kl"] == pytest.approx(metrics["kl"][0])
    if config.name == "grpo" and config.dual_clip is None:
        assert means["clipped_low"] > 0 and means["clipped_high"] > 0
        assert means["clipped_low"] == pytest.approx(metrics["clip_ratio/low_mean"][0])
        assert means["clipped_high"] == pytest.approx(metrics["clip_ratio/high_mean"][0])
    if config.name in ("gspo", "cispo"):
        assert means["clipped_low"] + means["clipped_high"] > 0


def test_every_loss_of_trl_is_compared_here() -> None:
    """By the names in its source, so that another version's fails here."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._compute_loss)
    lines = [line for line in source.splitlines() if "self.loss_type" in line]
    there = set(re.findall(r'"(\w+)"', "\n".join(lines)))
    assert there == {case.theirs.get("loss_type", "dapo") for case in CASES.values()}
    assert len(there) == 8


def nearly_on_policy(samples: list[Sample], policy: Policy) -> list[Sample]:
    """The samples as the policy would have them, so that products of weights are near 1."""
    out = []
    for one, now in zip(samples, policy.runner.row_logprobs(our_rows(samples)), strict=True):
        behaviour, values = list(one.behaviour), iter(now.tolist())
        for k, own in enumerate(one.own):
            if own:
                behaviour[k] = next(values) - 0.05 * (k % 3)
        out.append(replace(one, behaviour=behaviour))
    return out


PRESETS_THERE: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {},
    "dr_grpo": {
        **{"loss_type": "dr_grpo", "scale_rewards": "none"},
        **{"epsilon_high": 0.2, "max_completion_length": 4096},
    },
    "gspo": GSPO_THERE | {"epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": SAPO_THERE,
    "vespo": VESPO_THERE,
}


def preset_equals_trl(preset: str, seed: int = 0, budget: int = 10_000, **more: Any) -> None:
    """One optimizer step's loss and gradients with a preset and a KL term; with an entropy bonus
    where the loss is a mean over tokens, as TRL's bonus always is."""
    samples = random_samples(seed)
    bonus = 0.02 if TrainConfig(preset=preset).aggregation == "token" else 0.0
    config = TrainConfig(preset=preset, kl_coef=0.03, entropy_coef=bonus, **more)
    policy, frozen = small_policy(head_chunk=7), small_policy(5)
    if preset == "vespo":
        samples = nearly_on_policy(samples, policy)
    theirs = PRESETS_THERE[preset] | {
        "vllm_importance_sampling_clip_max": config.is_cap,
        "beta": 0.03,
        "entropy_coef": bonus,
        "_entropy_bonus_enabled": bonus > 0,
        "ref_model": fused(frozen),
    }
    trainer = made(policy, samples, **theirs)
    scored = trl_scored(trainer, samples)

    rows = our_rows(samples, config)
    for row, reference, now in zip(
        rows, frozen.runner.row_logprobs(rows), policy.runner.row_logprobs(rows), strict=True
    ):
        own = row["loss_mask"].bool()
        row["reference"] = torch.zeros(len(own), dtype=torch.float64)
        row["reference"][own] = reference
        row["sequence_log_weight"] = (now - row["logprobs"][own]).mean()
        weight = (now - row["logprobs"][own]).exp().clamp(max=config.is_cap)
        row["sequence_product"] = weight.prod().clamp(max=math.exp(20))
    if config.is_level == "sequence":
        # TRL takes the product over a row, here it is the geometric mean.
        weights = torch.stack([row["sequence_log_weight"] for row in rows]).exp()
        scored["importance_sampling_ratio"] = weights.clamp(max=config.is_cap)[:, None]
    expected = trainer._compute_loss(trainer.model, scored)
    expected.backward()

    n = count_trained(rows)
    stats = policy.accumulate(policy.runner.plan(rows, budget), n, loss_config(config))
    assert stats.loss == pytest.approx(float(expected.detach()), abs=1e-6)
    assert_same_gradients(policy, trainer, atol=1e-6)
    metrics, means = trainer._metrics["train"], stats.means()
    assert means["entropy"] == pytest.approx(metrics["entropy"][0], abs=1e-6)
    assert means["kl"] == pytest.approx(metrics["kl"][0], abs=1e-6)
    if config.is_level == "token":
        (weight,) = metrics["sampling/importance_sampling_ratio/mean"]
        assert means["weight"] == pytest.approx(weight, abs=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        *({"preset": preset} for preset in PRESETS_THERE),
        *({"preset": "grpo", "seed": seed} for seed in (1, 2)),
        *({"preset": "grpo", "seed": 4, "is_cap": cap} for cap in (0.5, 2.0)),
        {"preset": "grpo", "seed": 5, "budget": 40},
    ],
    ids=str,
)
def test_each_preset_equals_its_settings_in_trl(given: dict[str, Any]) -> None:
    preset_equals_trl(**given)


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_advantages_and_gradients_equal_those_of_trl(normalize: bool, beta: float) -> None:
    """RLOO's advantages, and the gradient of its loss before the policy has moved.

    TRL knows no tools' tokens here. Its clipped loss has another value and, on policy, the
    gradient of REINFORCE: the sum over an output's tokens, and the mean over outputs.
    """
    from trl.trainer.rloo_trainer import RLOOTrainer

    samples = [replace(one, own=[1] * len(one.output)) for one in random_samples(0)]
    config = TrainConfig(
        preset="rloo",
        constant_length=1,
        normalize_std="batch" if normalize else "none",
        kl_reward_coef=beta,
    )
    policy, frozen = small_policy(head_chunk=7), small_policy(5)
    # TRL's RLOO does not correct for the engine: its behaviour is the trainer's.
    now = policy.runner.row_logprobs(our_rows(samples))
    samples = [replace(s, behaviour=t.tolist()) for s, t in zip(samples, now, strict=True)]
    more = {"normalize_advantages": normalize, "beta": beta, "ref_model": fused(frozen)}
    trainer = made(policy, samples, kind=RLOOTrainer, **more)
    generated = trainer._generate([])
    trainer._generate = lambda _: (*generated[:2], [""] * len(samples))
    scored = trl_scored(trainer, samples)
    expected = trainer._compute_loss(trainer.model, scored)
    expected.backward()

    rows = our_rows(samples, config, frozen.runner.row_logprobs)
    got = torch.stack([row["advantages"] for row in rows])
    # With a reference TRL's fused head takes part, in float32.
    torch.testing.assert_close(got, scored["advantages"], atol=1e-6 if beta else 1e-9, rtol=0)
    policy.accumulate(policy.runner.plan(rows, 10_000), count_trained(rows), loss_config(config))
    assert_same_gradients(policy, trainer, atol=1e-5)


def test_the_penalty_of_long_outputs_equals_that_of_trl() -> None:
    from trl.rewards import get_soft_overlong_punishment

    config = TrainConfig(overlong_length=20, overlong_buffer=8)
    theirs = get_soft_overlong_punishment(20, 8)([[1] * n for n in range(30)])
    assert [-overlong_penalty(n, config) for n in range(30)] == pytest.approx(theirs)
