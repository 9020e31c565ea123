"""Every loss against its formula, written a second time in plain float64 arithmetic.

Values are computed token by token without torch; slopes are the derivatives, by hand.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.errors import fails_with
from trainer.loss import (
    LOSSES,
    LossConfig,
    LossInputs,
    LossStats,
    kl_term,
    needs_clipped_ratio,
    needs_sequence_product,
    needs_sequence_ratio,
    needs_sequence_weight,
)


class Token(NamedTuple):
    """One token's inputs, nats; ``ratio`` and ``weight`` are its row's mean log ratios, ``whole``
    is its row's product of ratios, ``clipped`` its mean clipped log ratio, ``rejected`` 1 if its
    row is, ``outlier`` 1 if it is left out by its square."""

    now: float
    old: float
    mu: float
    ref: float
    a: float
    u: float
    ratio: float
    weight: float
    entropy: float
    whole: float
    high: float
    clipped: float
    rejected: float
    outlier: float


def random_token(r: random.Random) -> Token:
    now = r.uniform(-4, 0)
    return Token(
        now,
        now + r.gauss(0, 0.6),
        now + r.gauss(0, 1.2),
        now + r.gauss(0, 0.5),
        r.choice((-1, 1)) * r.uniform(0.1, 2),
        r.uniform(0.2, 3),
        r.gauss(0, 0.3),
        r.gauss(0, 1.0),
        r.uniform(0, 3),
        math.exp(r.gauss(0, 0.7)),
        float(r.random() < 0.3),
        r.gauss(0, 0.2),
        float(now % 0.05 < 0.01),
        float(now % 0.03 < 0.006),
    )


def surrogate(t: Token, c: LossConfig) -> tuple[float, float]:
    """Value and slope by log pi_theta."""
    rho = math.exp(t.ratio) if c.name == "gspo" else math.exp(t.now - t.old)
    if c.name in ("grpo", "gspo"):
        bounded = min(max(rho, 1 - c.eps_low), 1 + c.eps_high)
        if t.a < 0 and c.dual_clip is not None and rho > c.dual_clip:
            return -c.dual_clip * t.a, 0.0
        if rho * t.a <= bounded * t.a:
            return -rho * t.a, -rho * t.a
        return -bounded * t.a, 0.0
    if c.name == "gmpo":
        log_rho = t.now - t.old
        inside = log_rho <= c.eps_high if t.a > 0 else log_rho >= -c.eps_low
        value = -math.exp(t.clipped) * t.a
        return value, value if inside else 0.0
    if c.name == "dppo":
        moved = math.exp(t.now) - math.exp(t.mu)
        gone = moved > c.eps_high if t.a > 0 else moved < -c.eps_low
        return (0.0, 0.0) if gone else (-rho * t.a, -rho * t.a)
    if c.name == "vespo":
        k, lam = (c.k_neg, c.lambda_neg) if t.a < 0 else (c.k_pos, c.lambda_pos)
        phi = t.whole**k * math.exp(lam * (1 - t.whole))
        return -phi * t.a * t.now, -phi * t.a
    if c.name == "cispo":
        bounded = min(max(rho, 1 - c.eps_low), 1 + c.eps_high)
        return -bounded * t.a * t.now, -bounded * t.a
    if c.name == "sapo":
        tau = c.tau_pos if t.a > 0 else c.tau_neg
        gate = 1 / (1 + math.exp(-tau * (rho - 1)))
        return -4 / tau * gate * t.a, -4 * gate * (1 - gate) * rho * t.a
    assert c.name == "reinforce"
    return -rho * t.a, -rho * t.a


def kl(t: Token, estimator: str) -> tuple[float, float]:
    d, rho = t.now - t.ref, math.exp(t.now - t.old)
    return {
        "k3_unbiased": (rho * (math.exp(-d) - 1 + d), rho * d),
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d)),
    }[estimator]


def importance(t: Token, c: LossConfig) -> float:
    if left_behind(t, c):
        return 0.0
    w = math.exp(_log_weight(t, c))
    if c.is_floor <= w <= c.is_cap:
        return w
    return 0.0 if c.is_mode == "mask" else min(max(w, c.is_floor), c.is_cap)


def left_behind(t: Token, c: LossConfig) -> bool:
    far = c.off_policy_threshold is not None and -(t.ratio + t.weight) > c.off_policy_threshold
    rejected = c.rejection_k3 is not None and t.rejected > 0
    outlier = c.second_moment is not None and t.outlier > 0
    return rejected or outlier or (far and t.a < 0)


def by_hand(tokens: list[Token], c: LossConfig, n: int) -> tuple[float, list[float], list[float]]:
    """The loss, its slopes by the log-probabilities, and those by the entropies."""
    total, slopes, of_entropies = 0.0, [], []
    for t in tokens:
        value, slope = surrogate(t, c)
        divergence, drift = kl(t, c.kl_estimator) if c.kl_coef else (0.0, 0.0)
        w = importance(t, c)
        if c.name == "vespo":  # the weights are in the row's product
            w = 0.0 if left_behind(t, c) else 1.0
        w *= t.high if c.top_entropy < 1 else 1.0
        total += t.u * (w * value + c.kl_coef * divergence - c.entropy_coef * t.entropy) / n
        slopes.append(t.u * (w * slope + c.kl_coef * drift) / n)
        of_entropies.append(-t.u * c.entropy_coef / n)
    return total, slopes, of_entropies


def run(tokens: list[Token], c: LossConfig, n: int) -> tuple[Tensor, Tensor, Tensor, LossStats]:
    """The loss, its slopes by the log-probabilities, and those by the entropies; statistics."""
    columns = {
        name: torch.tensor([getattr(t, name) for t in tokens], dtype=torch.float64)
        for name in Token._fields
    }
    now, entropies = columns["now"].requires_grad_(), columns["entropy"].requires_grad_()
    inputs = LossInputs(
        columns["mu"],
        columns["a"],
        proximal=columns["old"],
        reference=columns["ref"] if c.kl_coef else None,
        token_weights=columns["u"],
        sequence_log_ratio=columns["ratio"],
        sequence_log_weight=columns["weight"],
        sequence_product=columns["whole"],
        sequence_clipped_ratio=columns["clipped"],
        rejected=columns["rejected"] if c.rejection_k3 is not None else None,
        outlier=columns["outlier"] if c.second_moment is not None else None,
        high_entropy=columns["high"] if c.top_entropy < 1 else None,
    )
    loss, stats = LOSSES.find(c.name)(now, inputs, total_tokens=n, config=c, entropies=entropies)
    slopes = torch.autograd.grad(loss, [now, entropies], allow_unused=True, materialize_grads=True)
    return loss.detach(), *slopes, stats


CONFIGS = {
    "grpo": LossConfig(),
    "gspo": LossConfig("gspo", eps_low=0.1, eps_high=0.2, is_level="sequence"),
    "gmpo": LossConfig("gmpo", eps_low=0.3, eps_high=0.5),
    "dppo": LossConfig("dppo", eps_low=0.1, eps_high=0.05),
    "cispo": LossConfig("cispo", eps_low=0.6, eps_high=1.0),
    "sapo": LossConfig("sapo", tau_pos=0.9, tau_neg=1.3),
    "vespo": LossConfig("vespo", k_pos=1.5, lambda_pos=2.5, k_neg=3.5, lambda_neg=0.5),
    "reinforce": LossConfig("reinforce"),
    "dual clip": LossConfig(dual_clip=1.4),
    "dual clip of rows": LossConfig("gspo", eps_high=0.1, dual_clip=1.2),
    "two bounds": LossConfig(is_cap=1.5, is_floor=0.6),
    "masked beyond two bounds": LossConfig(is_cap=1.5, is_floor=0.6, is_mode="mask"),
    "off policy": LossConfig("sapo", off_policy_threshold=0.4, is_mode="mask", is_cap=1.5),
    "off policy, whole rows": LossConfig("vespo", off_policy_threshold=0.4),
    "rejected rows": LossConfig(rejection_k3=0.1, is_cap=1.5, kl_coef=0.1),
    "rejected whole rows": LossConfig("vespo", rejection_k3=0.1, off_policy_threshold=0.4),
    "second moment": LossConfig("reinforce", second_moment=0.04, rejection_k3=0.1, kl_coef=0.1),
    "high entropies": LossConfig("cispo", top_entropy=0.3, kl_coef=0.1, entropy_coef=0.05),
    "masked": LossConfig(is_mode="mask", is_cap=1.5),
    "masked rows": LossConfig(is_mode="mask", is_level="sequence", is_cap=1.5),
    "truncated rows": LossConfig("cispo", is_level="sequence", is_cap=1.5),
    "k1": LossConfig(kl_coef=0.1, kl_estimator="k1"),
    "k2": LossConfig("reinforce", kl_coef=0.1, kl_estimator="k2"),
    "k3": LossConfig("gspo", eps_low=0.2, eps_high=0.28, is_level="token", kl_coef=0.1),
    "k3_unbiased": LossConfig("cispo", kl_coef=0.1, kl_estimator="k3_unbiased"),
    "entropy": LossConfig("cispo", entropy_coef=0.05),
    "all terms": LossConfig("sapo", kl_coef=0.1, kl_estimator="k2", entropy_coef=0.05),
}


def equals_the_formula(name: str, seed: int = 0) -> None:
    r = random.Random(seed)
    tokens = [random_token(r) for _ in range(60)]
    c = CONFIGS[name]
    expected, slopes, of_entropies = by_hand(tokens, c, 100)
    loss, got, got_entropies, stats = run(tokens, c, 100)
    assert float(loss) == pytest.approx(expected, abs=1e-12)
    assert got.tolist() == pytest.approx(slopes, abs=1e-12)
    assert got_entropies.tolist() == pytest.approx(of_entropies, abs=1e-12)
    assert stats.weight == pytest.approx(sum(importance(t, c) for t in tokens))
    beyond = [not c.is_floor <= math.exp(_log_weight(t, c)) <= c.is_cap for t in tokens]
    behind = [left_behind(t, c) for t in tokens]
    gone = [g or (b and c.is_mode == "mask") for g, b in zip(behind, beyond, strict=True)]
    assert stats.is_masked == sum(gone)
    assert stats.is_capped == sum(b and not g for g, b in zip(gone, beyond, strict=True))
    assert sum(behind) > 0 or (c.off_policy_threshold is None and c.rejection_k3 is None)
    if c.name in ("grpo", "gspo"):
        rho = [(math.exp(t.ratio if c.name == "gspo" else t.now - t.old), t.a) for t in tokens]
        low = sum(x < 1 - c.eps_low for x, a in rho if a < 0)
        high = sum(x > 1 + c.eps_high for x, a in rho if a > 0)
        beyond_dual = sum(x > (c.dual_clip or math.inf) for x, a in rho if a < 0)
        assert (stats.clipped_low, stats.clipped_high) == (low, high + beyond_dual)
        assert low and high and bool(beyond_dual) is (c.dual_clip is not None)
    if c.kl_coef:
        assert stats.kl == pytest.approx(sum(kl(t, c.kl_estimator)[0] for t in tokens))


def _log_weight(t: Token, c: LossConfig) -> float:
    return t.weight if c.is_level == "sequence" else t.old - t.mu


@pytest.mark.parametrize("name", CONFIGS)
def test_every_loss_and_its_gradients_equal_its_formula(name: str) -> None:
    for seed in range(3):
        equals_the_formula(name, seed)


@given(st.sampled_from(sorted(CONFIGS)), st.integers(0, 10_000), st.data())
def test_neither_order_nor_micro_batches_change_a_loss(
    name: str, seed: int, data: st.DataObject
) -> None:
    r = random.Random(seed)
    tokens = [random_token(r) for _ in range(r.randint(2, 12))]
    cut = data.draw(st.integers(0, len(tokens)))
    order = data.draw(st.permutations(range(len(tokens))))
    c, n = CONFIGS[name], len(tokens)
    loss, slopes, of_entropies, stats = run(tokens, c, n)
    shuffled = [tokens[k] for k in order]
    parts = [run(part, c, n) for part in (shuffled[:cut], shuffled[cut:])]
    assert sum(float(part[0]) for part in parts) == pytest.approx(float(loss), abs=1e-12)
    for k, whole in ((1, slopes), (2, of_entropies)):
        got = torch.cat([part[k] for part in parts]).tolist()
        assert got == pytest.approx([float(whole[place]) for place in order], abs=1e-12)
    assert (parts[0][3] + parts[1][3]).means() == pytest.approx(stats.means(), abs=1e-12)


def test_each_kl_estimate_has_the_mean_gradient_of_its_divergence() -> None:
    """On policy k2's mean slope is the gradient of KL(pi, ref), k3's that of KL(ref, pi), and k1's
    is 0; the policy is a softmax over four tokens."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, generator=g, dtype=torch.float64).requires_grad_()
    reference = torch.randn(4, generator=g, dtype=torch.float64).log_softmax(-1)
    p = logits.log_softmax(-1)

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    def mean_slope(estimator: str) -> Tensor:
        return gradient((p.detach().exp() * kl_term(p, reference, estimator)).sum())

    forward = gradient((p.exp() * (p - reference)).sum())
    backward = gradient((reference.exp() * (reference - p)).sum())
    torch.testing.assert_close(mean_slope("k1"), torch.zeros_like(forward))
    torch.testing.assert_close(mean_slope("k2"), forward)
    torch.testing.assert_close(mean_slope("k3"), backward)
    # The unbiased estimate also over tokens that another policy samples.
    other = torch.randn(4, generator=g, dtype=torch.float64).log_softmax(-1)
    unbiased = torch.exp(p - other) * kl_term(p, reference, "k3_unbiased")
    torch.testing.assert_close(gradient((other.exp() * unbiased).sum()), forward)


def test_gspo_and_its_token_form_agree_where_a_row_has_one_advantage() -> None:
    """The gradient of s_i A by the row's log-probabilities, for one row of five tokens."""
    g = torch.Generator().manual_seed(1)
    now = (-torch.rand(5, generator=g, dtype=torch.float64)).requires_grad_()
    old = now.detach() + 0.02 * torch.randn(5, generator=g, dtype=torch.float64)
    s = torch.exp((now - old).mean())
    (expected,) = torch.autograd.grad(-torch.min(s, s.clamp(0.9, 1.1)), now)
    log_ratio = (now.detach() - old).mean().expand(5)
    inputs = LossInputs(old, torch.ones_like(old), old, sequence_log_ratio=log_ratio)
    config = LossConfig("gspo", eps_low=0.1, eps_high=0.1, is_level="token")
    loss, stats = LOSSES.find("gspo")(now, inputs, total_tokens=5, config=config)
    (got,) = torch.autograd.grad(loss, now)
    torch.testing.assert_close(got, expected, atol=1e-15, rtol=0)
    assert stats.means()["ratio"] == pytest.approx(float(s.detach()))


def test_a_weight_of_0_takes_a_row_out_of_vespo_and_a_large_one_nearly() -> None:
    now = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    whole = torch.tensor([0.0, 1.0, math.exp(20)], dtype=torch.float64)
    given = LossInputs(now.detach(), torch.ones_like(whole), sequence_product=whole)
    LOSSES.find("vespo")(now, given, total_tokens=4, config=LossConfig("vespo"))[0].backward()
    assert now.grad is not None and now.grad.tolist() == [0.0, -0.25, 0.0]


@pytest.mark.parametrize(
    ("config", "given", "says"),
    [
        ({"kl_coef": 0.1}, {}, "kl_coef > 0"),
        ({}, {"reference": torch.zeros(1)}, "kl_coef > 0"),
        ({"entropy_coef": 0.1}, {}, "entropies"),
        ({"is_level": "sequence"}, {}, "is_level=sequence"),
        ({"off_policy_threshold": 1.0}, {}, "off_policy_threshold"),
        ({"rejection_k2": 0.5}, {}, "rejected"),
        ({"second_moment": 0.5}, {}, "outlier"),
        ({"top_entropy": 0.5}, {}, "high_entropy"),
        ({"name": "vespo"}, {}, "sequence_product"),
        ({}, {"token_weights": torch.zeros(2)}, "token's weight"),
    ],
)
def test_a_loss_without_an_input_that_it_needs_is_refused(
    config: dict[str, Any], given: dict[str, Any], says: str
) -> None:
    one = torch.zeros(1)
    with fails_with(ValueError, says):
        LOSSES.find(config.get("name", "grpo"))(
            one, LossInputs(one, one, **given), total_tokens=1, config=LossConfig(**config)
        )


def test_a_loss_asks_for_the_means_of_rows() -> None:
    asked = {name for name in CONFIGS if needs_sequence_ratio(CONFIGS[name])}
    behind = {"off policy", "off policy, whole rows", "rejected whole rows"}
    assert asked == {"gspo", "dual clip of rows", "k3"} | behind
    of_rows = {name for name in CONFIGS if needs_sequence_weight(CONFIGS[name])}
    rows = {"gspo", "gmpo", "dual clip of rows", "masked rows", "truncated rows"}
    assert of_rows == rows | behind
    assert {name for name in CONFIGS if needs_clipped_ratio(CONFIGS[name])} == {"gmpo"}
    products = {name for name in CONFIGS if needs_sequence_product(CONFIGS[name])}
    assert products == {"vespo", "off policy, whole rows", "rejected whole rows"}
    assert not needs_sequence_ratio(LossConfig("trainer.sft.likelihood_loss"))
