"""Shared prefixes are computed once, and nothing else changes: rows are the oracle."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.errors import fails_with
from tests.support.trainer.policies import assert_same, gradients, small_policy
from tests.support.trainer.trees import (
    SHAPES,
    episode_rows,
    relative,
    shaped_model,
    shaped_policy,
    tree_rows,
)
from trainer.loss import LossConfig
from trainer.model import PolicyConfig
from trainer.model_probes import ModelProbe
from trainer.policy import Policy
from trainer.rows import Row, count_trained
from trainer.world import alone, leave, whole_tensor

BUDGETS = [2, 9, 40, 10_000]


def computed(
    policy: Policy, rows: list[Row], budget: int = 10_000, config: LossConfig | None = None
) -> tuple[list[Tensor], float, dict[str, Tensor]]:
    """The rows' log-probabilities, the loss and its gradients."""
    policy.model.zero_grad(set_to_none=True)
    config = config or LossConfig()
    stats = policy.accumulate(policy.runner.plan(rows, budget), count_trained(rows), config)
    out = gradients(policy)
    policy.model.zero_grad(set_to_none=True)
    assert stats.tokens == count_trained(rows)
    return policy.runner.row_logprobs(rows, budget), stats.loss, out


@pytest.mark.parametrize(
    ("shape", "budget"),
    [
        pytest.param(*both, marks=() if "qwen3" in both or 9 in both else pytest.mark.service)
        for both in product(SHAPES, BUDGETS)
    ],
)
def test_logprobs_loss_and_gradients_are_those_of_rows(
    shape: str, budget: int, seed: int = 0
) -> None:
    rows = tree_rows(seed)
    oracle, policy = (shaped_policy(shape, packing=way) for way in ("rows", "tree"))
    assert (oracle.runner.packing, policy.runner.packing) == ("rows", "tree")
    logprobs, loss, expected = computed(oracle, rows)
    found, again, got = computed(policy, rows, budget)
    assert len(found) == len(rows)
    for one, other in zip(found, logprobs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)
    assert again == pytest.approx(loss, abs=1e-10)
    assert_same(got, expected, atol=1e-10, rtol=1e-10)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from(BUDGETS))
@pytest.mark.service
def test_random_trees_equal_rows(seed: int, budget: int) -> None:
    test_logprobs_loss_and_gradients_are_those_of_rows("qwen3", budget, seed)


ALL_TERMS = [
    LossConfig("gspo", is_level="sequence", kl_coef=0.1, entropy_coef=0.05),
    LossConfig("cispo", is_mode="mask", is_cap=1.2, kl_coef=0.1, kl_estimator="k2"),
    LossConfig("sapo", is_level="sequence", is_mode="mask", kl_coef=0.1, kl_estimator="k1"),
    LossConfig("gmpo", eps_low=0.05, eps_high=0.05, off_policy_threshold=0.2, kl_coef=0.1),
    LossConfig("vespo", off_policy_threshold=0.2, kl_coef=0.1, kl_estimator="k3_unbiased"),
    LossConfig(kl_coef=0.1, entropy_coef=0.05),
]


def with_all_inputs(rows: list[Row], seed: int) -> list[Row]:
    """Rows with everything that a loss may be given."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    out = []
    for row in rows:
        n = len(row["input_ids"])
        more = {
            "proximal": -3.9 + 0.3 * normal(n),
            "reference": -3.9 + 0.3 * normal(n),
            "token_weights": normal().abs(),
            "sequence_log_ratio": 0.1 * normal(),
            "sequence_log_weight": 0.5 * normal(),
            "sequence_product": normal().exp(),
            "sequence_clipped_ratio": 0.1 * normal(),
        }
        out.append(row | more)
    return out


@pytest.mark.parametrize("config", ALL_TERMS, ids=lambda c: c.name)
@pytest.mark.service
def test_all_terms_of_the_loss_equal_those_computed_by_rows(config: LossConfig) -> None:
    """A row's scalars and the entropies' gradient, wherever the row's tokens are computed."""
    rows = with_all_inputs(tree_rows(5), 5)
    _, loss, expected = computed(shaped_policy("qwen3", packing="rows"), rows, 10_000, config)
    for budget in BUDGETS:
        _, again, got = computed(shaped_policy("qwen3"), rows, budget, config)
        assert again == pytest.approx(loss, abs=1e-10)
        assert_same(got, expected, atol=1e-10, rtol=1e-10)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 200), st.randoms())
@pytest.mark.service
def test_neither_order_nor_budget_changes_logprobs_and_gradients(
    seed: int, budget: int, chance: random.Random
) -> None:
    policy = shaped_policy("qwen3", torch.float32)
    rows = tree_rows(seed, torch.float32)
    logprobs, loss, expected = computed(policy, rows)
    order = list(range(len(rows)))
    chance.shuffle(order)
    shuffled = [rows[k] for k in order]
    found, again, got = computed(policy, shuffled)
    # The same plan: bit for bit.
    assert again == loss
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(one, logprobs[k]) for one, k in zip(found, order, strict=True))
    # Another plan: up to rounding, which float64 tells from a fault.
    policy, rows = shaped_policy("qwen3"), tree_rows(seed)
    _, loss, expected = computed(policy, rows)
    _, other, parts = computed(policy, [rows[k] for k in order], budget)
    assert other == pytest.approx(loss, abs=1e-12)
    assert_same(parts, expected, atol=1e-10)


def test_every_distinct_token_is_computed_once() -> None:
    rows = tree_rows(3)
    used = [r["input_ids"][: int(r["loss_mask"].nonzero()[-1])].tolist() for r in rows]
    distinct = {tuple(ids[: n + 1]) for ids in used for n in range(len(ids))}
    policy = shaped_policy("qwen3")
    for budget in BUDGETS:
        passes = policy.runner.plan(rows, budget)
        assert sum(one.ids.numel() for one in passes) == len(distinct)
        assert sum(len(one.items) for one in passes) == count_trained(rows)
    stats = policy.accumulate(policy.runner.plan(rows, 9), count_trained(rows), LossConfig())
    assert stats.tokens_computed == len(distinct)
    assert stats.tokens_in_rows == sum(len(r["input_ids"]) for r in rows)


@pytest.mark.parametrize("budget", [9, 10_000])
def test_checkpointing_and_offloading_change_nothing(budget: int) -> None:
    rows = tree_rows(4)
    plain = shaped_policy("qwen3")
    logprobs, loss, expected = computed(plain, rows)
    for saving in ({"gradient_checkpointing": True}, {"offload": True}):
        policy = shaped_policy("qwen3", **saving)
        assert policy.runner.packing == "tree"
        assert _tokens(policy, rows, budget) == _tokens(plain, rows, budget)
        found, again, got = computed(policy, rows, budget)
        for one, other in zip(found, logprobs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
        assert again == pytest.approx(loss, abs=1e-12)
        assert_same(_whole(got), expected, atol=1e-12)


def test_an_episode_in_bfloat16_is_computed_once_and_no_rougher_than_by_rows() -> None:
    """The gradients of a turn's keys and values come from every later turn."""
    rows = episode_rows(60)
    _, _, exact = computed(shaped_policy("qwen3", packing="rows"), rows)
    errors = []
    for way in ("rows", "tree"):
        model = shaped_model("qwen3", torch.float32)
        policy = Policy(model, PolicyConfig(dtype=torch.bfloat16, packing=way))
        _, _, got = computed(policy, rows, 16)
        errors.append(sum(relative(tensor, exact[name]) for name, tensor in _whole(got).items()))
    assert _tokens(policy, rows, 16) == [int(rows[-1]["loss_mask"].nonzero()[-1])] * 2
    by_rows, by_tree = errors
    assert 0 < by_tree <= 1.2 * by_rows


def _tokens(policy: Policy, rows: list[Row], budget: int) -> list[int]:
    """The tokens that are planned, and those that an update has computed."""
    passes = policy.runner.plan(rows, budget)
    stats = policy.accumulate(passes, count_trained(rows), LossConfig())
    policy.model.zero_grad(set_to_none=True)
    return [sum(one.ids.numel() for one in passes), stats.tokens_computed]


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole_tensor(one, torch.device("cpu")) for name, one in tensors.items()}


def test_passes_are_as_long_as_chosen_unless_a_budget_is_given() -> None:
    rows = [row for seed in range(40) for row in tree_rows(seed, count=30)]
    for row in rows:
        row["input_ids"] = row["input_ids"].clone()
    policy = small_policy()
    assert 1 < len(policy.runner.plan(rows, 300)) != len(policy.runner.plan(rows))
    assert max(one.ids.numel() for one in policy.runner.plan(rows)) <= policy.runner.pass_tokens
    with fails_with(ValueError, "budget"):
        policy.runner.plan(rows, 0)


def refused(caplog: pytest.LogCaptureFixture, model: object) -> str:
    """Why the model is computed by rows."""
    with caplog.at_level(logging.WARNING, "trainer.pass_runner"):
        policy = Policy(model)
    assert policy.runner.packing == "rows"
    policy.train(tree_rows(5), 40)
    (record,) = caplog.records
    caplog.clear()
    return record.getMessage()


def test_models_with_other_attention_are_computed_by_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = refused(caplog, shaped_model("mistral", sliding_window=16))
    assert "MistralForCausalLM" in said and "16 tokens" in said and "256" in said
    layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}
    said = refused(caplog, shaped_model("qwen3", use_sliding_window=True, **layers))
    assert "window of 16" in said
    mixed = shaped_model("qwen3", layer_types=["linear_attention", "full_attention"])
    probe = ModelProbe(mixed, lambda *_: torch.zeros(0), torch.float64, torch.device("cpu"))
    reason = probe.use_tree_attention()
    assert reason is not None and "plain attention (linear_attention)" in reason
    other = shaped_model("qwen3")
    other.set_attn_implementation("eager")
    assert "the attention eager" in refused(caplog, other)


def test_the_probe_finds_what_no_setting_says(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    model = shaped_model("qwen3")
    original = model.model.layers[1].self_attn.forward

    def forgetful(*args: object, **given: object) -> object:
        given.pop("tree", None)
        return original(*args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].self_attn, "forward", forgetful)
        assert "1 of 2 layers" in refused(caplog, model)

    model = shaped_model("qwen3")
    interface = modeling_qwen3.ALL_ATTENTION_FUNCTIONS["any_agent_tree"]

    def bent(module: object, *args: object, tree: object = None, **given: object) -> object:
        out, _ = interface(module, *args, tree=tree, **given)
        return (out if tree is None else out * 1.1), None

    with monkeypatch.context() as patch:
        patch.setitem(modeling_qwen3.ALL_ATTENTION_FUNCTIONS, "any_agent_tree", bent)
        assert "hidden states" in refused(caplog, model)


@pytest.mark.parametrize("budget", [9, 10_000])
def test_a_process_of_several_gives_each_row_its_own_logprobs(budget: int) -> None:
    """Passes in an order that several processes share: every row keeps its number."""
    rows = tree_rows(0)
    expected = small_policy().runner.row_logprobs(rows)
    try:
        policy = small_policy(world=replace(alone("cpu"), size=2))
        found = policy.runner.row_logprobs(rows, budget)
        passes = policy.runner.plan(rows, budget)
    finally:
        leave()
    assert len(passes) > 1 or budget > 100
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)
