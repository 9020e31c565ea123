"""Each law fails when the error it guards against is planted; unplanted, it holds.

So a green law says something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.trainer.test_trl
import trainer.advantage
import trainer.batch
import trainer.kl_reward
import trainer.logprobs
import trainer.loss
import trainer.packing
import trainer.pass_runner
import trainer.policy
import trainer.rows
import trainer.surrogates
import trainer.trie
from any_agent.config import TrainConfig
from tests.support.trainer.policies import (
    assert_same,
    dense_gradients,
    random_rows,
    small_policy,
    trainer_gradients,
)
from tests.trainer.test_advantage import (
    batch_law,
    batch_of_groups_law,
    deviation_of_the_batch_law,
    leave_one_out_law,
    worked_example,
)
from tests.trainer.test_batch import mean_law, overlong_law
from tests.trainer.test_kl_reward import returns_law
from tests.trainer.test_packing import staleness_law
from tests.trainer.test_surrogates import equals_the_formula
from tests.trainer.test_tree import divided_law, equals_rows
from tests.trainer.test_trl import (
    given_equal_trl,
    loss_and_gradients_equal_trl,
    preset_equals_trl,
    rloo_equals_trl,
)
from tests.trainer.test_updates import entropies_law, inputs_law, undo_law, updates_law
from trainer.advantage import SessionRewards
from trainer.kl_reward import found_divergences
from trainer.loss import LOSSES, LossConfig, LossInputs, PolicyLoss, Surrogate
from trainer.packing import Pass
from trainer.rows import Row
from trainer.surrogates import _clipped
from trainer.tree_attention import TreePass
from trainer.trie import Block, NodePass, Trie
from trainer.updates import Snapshot


def dense_law(packing: str = "tree") -> None:
    policy = small_policy(head_chunk=7, packing=packing)
    rows = random_rows(0)
    expected = dense_gradients(policy, rows, LossConfig())
    _, got = trainer_gradients(policy, rows, token_budget=60)
    assert_same(got, expected, atol=1e-10)


LAWS: dict[str, Callable[[], None]] = {
    "dense gradients": dense_law,
    "padded rows' gradients": lambda: dense_law("rows"),
    "TRL's loss and gradients": loss_and_gradients_equal_trl,
    "the worked example": worked_example,
    "staleness": staleness_law,
    "trees equal rows": lambda: equals_rows("qwen3", 0, 10_000),
    "divided trees equal rows": lambda: equals_rows("qwen3", 0, 9),
    "divided weights": divided_law,
    "several updates": updates_law,
    "inputs of several updates": inputs_law,
    "tokens of high entropy": entropies_law,
    "a step is undone": undo_law,
    "GSPO's formula": lambda: equals_the_formula("gspo"),
    "CISPO's formula": lambda: equals_the_formula("cispo"),
    "REINFORCE's formula": lambda: equals_the_formula("reinforce"),
    "SAPO's formula": lambda: equals_the_formula("sapo"),
    "VESPO's formula": lambda: equals_the_formula("vespo"),
    "TRL's VESPO": lambda: given_equal_trl("vespo", 1),
    "the dual clip's formula": lambda: equals_the_formula("dual clip"),
    "rows off policy": lambda: equals_the_formula("off policy"),
    "two bounds of weights": lambda: equals_the_formula("two bounds"),
    "the unbiased k3's formula": lambda: equals_the_formula("k3_unbiased"),
    "returns of tokens": returns_law,
    "TRL's RLOO with its KL": lambda: rloo_equals_trl(normalize=False, beta=0.2),
    "k2's formula": lambda: equals_the_formula("k2"),
    "k3's formula": lambda: equals_the_formula("k3"),
    "masked weights' formula": lambda: equals_the_formula("masked"),
    "weights of rows": lambda: equals_the_formula("truncated rows"),
    "the formula of all terms": lambda: equals_the_formula("all terms"),
    "TRL's GSPO": lambda: given_equal_trl("gspo"),
    "TRL's Dr.GRPO": lambda: preset_equals_trl("dr_grpo"),
    "TRL's CISPO with KL and entropy": lambda: preset_equals_trl("cispo"),
    "TRL's RLOO": lambda: rloo_equals_trl(normalize=False),
    "leave one out": leave_one_out_law,
    "the batch's mean": batch_law,
    "the group's mean and the batch": batch_of_groups_law,
    "the batch's deviation": deviation_of_the_batch_law,
    "the mean over sessions": lambda: mean_law("session"),
    "the mean over rows": lambda: mean_law("turn"),
    "the constant length": lambda: mean_law("constant"),
    "long outputs": overlong_law,
}

grpo = LOSSES.find("grpo")
original_sapo = trainer.surrogates.sapo.surrogate
original_vespo = trainer.surrogates.vespo.surrogate
original_frame = PolicyLoss.__call__
original_kl_term = trainer.loss.kl_term
original_off_policy = trainer.loss.off_policy
original_with_returns = trainer.kl_reward.with_returns
original_with_high_entropies = trainer.policy.with_high_entropies
original_with_sequence_products = trainer.policy.with_sequence_products
original_weight = trainer.loss.importance_weight
original_mean_and_std = trainer.advantage._mean_and_std
original_pools = trainer.advantage._pools
original_weighted = trainer.batch.weighted
original_penalty = trainer.advantage.overlong_penalty
original_trained_positions = trainer.packing.trained_positions
original_padded_passes = trainer.packing.padded_passes
original_label_logprobs = trainer.logprobs._label_logprobs
original_trie_of = trainer.trie.trie_of
original_plan_passes = trainer.trie.plan_passes
original_tree_passes = trainer.packing.tree_passes
original_in_common = trainer.packing.in_common
original_with_values = trainer.policy.with_values
original_with_sequence_means = trainer.policy.with_sequence_means


def no_shift(*given: Any) -> list[Pass]:
    return [
        replace(one, items=replace(one.items, sources=one.items.sources + 1))
        for one in original_padded_passes(*given)
    ]


def mask_shifted(row: Row) -> Tensor:
    """The mask taken as if it spoke of the predicting position."""
    positions = original_trained_positions(row) + 1
    return positions[positions < len(row["input_ids"])]


def no_temperature(
    h: Tensor, w: Tensor, b: Tensor | None, t: Tensor, *labels: Any
) -> tuple[Tensor, Tensor | None]:
    return original_label_logprobs(h, w, b, torch.ones_like(t), *labels)


def one_temperature_for_all(
    h: Tensor, w: Tensor, b: Tensor | None, t: Tensor, *labels: Any
) -> tuple[Tensor, Tensor | None]:
    return original_label_logprobs(h, w, b, t.mean().expand_as(t), *labels)


def over_turns(group: Sequence[SessionRewards]) -> list[float]:
    return [r for s in group for r, c in zip(s.rewards, s.counted, strict=True) if c]


def n_of_the_micro_batch(logprobs: Tensor, *rest: Any, total_tokens: int, **more: Any) -> Any:
    return grpo(logprobs, *rest, total_tokens=logprobs.numel(), **more)


def no_importance_weight(logprobs: Tensor, inputs: LossInputs, **more: Any) -> Any:
    return grpo(logprobs, replace(inputs, behaviour=logprobs.detach()), **more)


def no_cap(*given: Any, config: LossConfig, **more: Any) -> Any:
    return grpo(*given, config=LossConfig(is_cap=1e9), **more)


def weight_with_gradient(
    logprobs: Tensor, inputs: LossInputs, *, total_tokens: int, **more: Any
) -> Any:
    """The forgotten stop_grad: w moves with the policy."""
    _, stats = grpo(logprobs, inputs, total_tokens=total_tokens, **more)
    w = torch.exp(logprobs - inputs.behaviour).clamp(max=5.0)
    rho = torch.exp(logprobs - logprobs.detach())
    return -(w * rho * inputs.advantages).sum() / total_tokens, stats


def flipped_advantages(logprobs: Tensor, inputs: LossInputs, **more: Any) -> Any:
    return grpo(logprobs, replace(inputs, advantages=-inputs.advantages), **more)


def ratio_of_tokens(
    logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig
) -> Surrogate:
    """Each token's own ratio for the row's."""
    return _clipped(torch.exp(logprobs - proximal), inputs.advantages, config)


def ratio_without_gradient(
    logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig
) -> Surrogate:
    """The row's ratio as a constant: nothing would be learned by it."""
    ratio = 0 * logprobs + 1
    assert inputs.sequence_log_ratio is not None
    return _clipped(ratio * torch.exp(inputs.sequence_log_ratio), inputs.advantages, config)


def moving_weight(
    logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig
) -> Surrogate:
    """CISPO's forgotten stop_grad."""
    ratio = torch.exp(logprobs - proximal)
    weight = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
    return Surrogate(-weight * inputs.advantages * logprobs, ratio)


def clipped_token(
    logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig
) -> Surrogate:
    """PPO's clip where none belongs: clipped tokens lose their gradient."""
    return _clipped(torch.exp(logprobs - proximal), inputs.advantages, config)


def stale_ratio(
    logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig
) -> Surrogate:
    """No correction for the steps since pi_prox."""
    ratio = torch.exp(logprobs - logprobs.detach())
    return Surrogate(-ratio * inputs.advantages, ratio)


def gate_of_the_other_sign(
    logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig
) -> Surrogate:
    other = replace(config, tau_pos=config.tau_neg, tau_neg=config.tau_pos)
    return original_sapo(logprobs, proximal, inputs, other)


def weight_of_the_other_sign(
    logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig
) -> Surrogate:
    k, decay = (config.k_neg, config.k_pos), (config.lambda_neg, config.lambda_pos)
    names = ("k_pos", "k_neg", "lambda_pos", "lambda_neg")
    other = replace(config, **dict(zip(names, (*k, *decay), strict=True)))
    return original_vespo(logprobs, proximal, inputs, other)


def weight_without_decay(
    logprobs: Tensor, proximal: Tensor, inputs: LossInputs, config: LossConfig
) -> Surrogate:
    little = replace(config, lambda_pos=1e-9, lambda_neg=1e-9)
    return original_vespo(logprobs, proximal, inputs, little)


def every_sign(inputs: LossInputs, config: LossConfig) -> Tensor:
    """Rows of positive advantages dropped, too."""
    return original_off_policy(replace(inputs, advantages=-inputs.advantages.abs()), config)


def since_the_proximal(inputs: LossInputs, config: LossConfig) -> Tensor:
    """The divergence of the proximal policy, without the updates since."""
    return original_off_policy(replace(inputs, sequence_log_ratio=None), config)


def own_divergence_given_back(row: Any, divergence: Tensor, factor: float) -> Any:
    """Leave a token's own divergence out of its loss of reward."""
    return original_with_returns(row, divergence.roll(-1), factor)


def divergence_of_the_other_sign(rows: Any, reference: Any) -> Any:
    return [-d for d in found_divergences(rows, reference)]


def kl_without_half(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    return 2 * original_kl_term(logprobs, reference, estimator)


def kl_without_its_linear_part(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    return torch.exp(reference - logprobs) - 1


def never_masked(proximal: Tensor, inputs: LossInputs, config: LossConfig) -> Any:
    return original_weight(proximal, inputs, replace(config, is_mode="truncate"))


def always_of_tokens(proximal: Tensor, inputs: LossInputs, config: LossConfig) -> Any:
    return original_weight(proximal, inputs, replace(config, is_level="token"))


def weight_of_all_terms(frame: PolicyLoss, *given: Any, config: LossConfig, **more: Any) -> Any:
    """The importance weight on the KL term, too."""
    plain, stats = original_frame(frame, *given, config=config, **more)
    logprobs, inputs = given
    weight, _ = original_weight(inputs.proximal, inputs, config)
    kl = original_kl_term(logprobs, inputs.reference, config.kl_estimator)
    extra = config.kl_coef * (weight - 1) * kl * inputs.token_weights
    return plain + extra.sum() / more["total_tokens"], stats


def no_token_weights(inputs: Any) -> LossInputs:
    return LossInputs(inputs["logprobs"], inputs["advantages"], reference=inputs.get("reference"))


def entropies_without_gradient(*given: Any) -> tuple[Tensor, Tensor | None]:
    return original_label_logprobs(*given[:-1], False)


def mean_of_all(pool: Sequence[float], score: float | None) -> float | None:
    """The session's own score in its baseline."""
    return None if score is None else sum(pool) / len(pool)


def population_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    mean, std = original_mean_and_std(values)
    return mean, None if std is None else std * ((len(values) - 1) / len(values)) ** 0.5


def dropped_groups_counted(groups: Any) -> Any:
    """The batch with the scores of groups without variance."""
    _, stays, _ = original_pools(groups)
    pools = [trainer.advantage._pool(group) for group in groups]
    batch = [score for pool in pools for score in pool]
    alone = [len(group) == 1 for group in groups]
    return [batch if one else pool for one, pool in zip(alone, pools, strict=True)], stays, batch


def weights_of_each_row(sessions: Any, aggregation: str, *rest: Any) -> Any:
    """Sessions of several rows counted several times."""
    return original_weighted([[row] for rows in sessions for row in rows], aggregation, *rest)


def weights_of_sessions(sessions: Any, aggregation: str, *rest: Any) -> Any:
    return original_weighted(sessions, "session", *rest)


def penalty_above_the_length(length: int, config: TrainConfig) -> float:
    """The buffer above the length, not below it."""
    later = config.model_copy(
        update={"overlong_length": (config.overlong_length or 0) + (config.overlong_buffer or 0)}
    )
    return original_penalty(length, later)


def depths_in_the_pass(*given: Any, **more: Any) -> Trie:
    """Positions counted through the pass, not from the root."""
    trie = original_trie_of(*given, **more)
    return replace(trie, depths=np.arange(len(trie.depths)))


def siblings_seen(trie: Trie) -> NodePass:
    """Causal over all tokens of the pass, as packed rows without their boundaries."""
    n = len(trie.tokens)
    (whole,) = original_plan_passes(trie, max(2 * n, 2))
    return replace(whole, blocks=[Block(0, n, 0, n, causal=True)])


def ancestors_forgotten(trie: Trie, budget: int) -> list[NodePass]:
    plan = original_plan_passes(trie, budget)
    for one in plan:
        one.blocks = [block for block in one.blocks if block.level in (None, 0)]
    return plan


def numbered_by_pass(*given: Any) -> list[Pass]:
    """The rows of each pass are one, with its number."""
    return [
        replace(one, items=replace(one.items, sequences=torch.full_like(one.items.sequences, k)))
        for k, one in enumerate(original_in_common(*given))
    ]


def edges_of(work: Pass) -> Tensor:
    """The number of each item's edge: the token that predicts, and the label."""
    pairs = torch.stack([work.items.sources, work.items.labels])
    return torch.unique(pairs, dim=1, return_inverse=True)[1]


def one_item_an_edge(*given: Any, **more: Any) -> list[Pass]:
    out = []
    for work in original_tree_passes(*given, **more):
        seen: dict[int, int] = {}
        for k, edge in enumerate(edges_of(work).tolist()):
            seen.setdefault(edge, k)
        places = torch.tensor(list(seen.values()), dtype=torch.int64)
        out.append(replace(work, items=work.items.at(places, work.items.sources[places])))
    return out


def advantages_averaged(*given: Any, **more: Any) -> list[Pass]:
    """One advantage for the items of an edge, before the weight and the clip."""
    out = []
    for work in original_tree_passes(*given, **more):
        edges, a = edges_of(work), work.items.inputs["advantages"]
        mean = torch.zeros_like(a).index_add(0, edges, a) / edges.bincount(minlength=len(a)).clip(1)
        inputs = work.items.inputs | {"advantages": mean[edges]}
        out.append(replace(work, items=replace(work.items, inputs=inputs)))
    return out


def shares_of_equals(shares: Tensor) -> Tensor:
    """Two parts of attention combined half and half."""
    return torch.full_like(shares, 0.5)


def no_proximal(rows: Sequence[Row], name: str, values: Sequence[Tensor]) -> list[Row]:
    """pi_prox is the policy before each update, not before the first."""
    return list(rows) if name == "proximal" else original_with_values(rows, name, values)


def sums_instead(rows: Sequence[Row], name: str, *more: Any) -> list[Row]:
    out = original_with_sequence_means(rows, name, *more)
    return [row | {name: row[name] * row["loss_mask"].sum()} for row in out]


def of_the_next_row(rows: Sequence[Row], logprobs: Any, config: LossConfig) -> list[Row]:
    out = original_with_sequence_products(rows, logprobs, config)
    shifted = [out[-1], *out]
    name = "sequence_product"
    return [row | {name: other[name]} for row, other in zip(out, shifted, strict=False)]


def choice_of_each_row(rows: Sequence[Row], entropies: Any, *more: Any) -> list[Row]:
    return [
        original_with_high_entropies([row], [values], *more)[0]
        for row, values in zip(rows, entropies, strict=True)
    ]


def weights_alone(before: Snapshot) -> None:
    """The moments of the undone updates stay."""
    for parameter, value, _ in before._parameters:
        parameter.data.copy_(value)


class Plant(NamedTuple):
    law: str
    owner: Any
    name: str
    error: Any


PLANTS = {
    "the label's own hidden state": Plant(
        "padded rows' gradients", trainer.pass_runner, "padded_passes", no_shift
    ),
    "shifted mask": Plant("dense gradients", trainer.packing, "trained_positions", mask_shifted),
    "shifted mask, against TRL": Plant(
        "TRL's loss and gradients", trainer.packing, "trained_positions", mask_shifted
    ),
    "missing temperature": Plant(
        "dense gradients", trainer.logprobs, "_label_logprobs", no_temperature
    ),
    "missing temperature, against TRL": Plant(
        "TRL's loss and gradients", trainer.logprobs, "_label_logprobs", no_temperature
    ),
    "one temperature for all rows": Plant(
        "dense gradients", trainer.logprobs, "_label_logprobs", one_temperature_for_all
    ),
    "baseline over turns": Plant("the worked example", trainer.advantage, "_pool", over_turns),
    "deviation not offset": Plant("TRL's loss and gradients", trainer.advantage, "STD_FLOOR", 1e-2),
    "staleness off by one": Plant(
        "staleness", trainer.rows, "_too_old", lambda age, eta: age >= eta
    ),
    "staleness off by one, lenient": Plant(
        "staleness", trainer.rows, "_too_old", lambda age, eta: age > eta + 1
    ),
    "N of the micro-batch": Plant(
        "dense gradients", LOSSES, "find", lambda _: n_of_the_micro_batch
    ),
    "no importance weight": Plant(
        "dense gradients", LOSSES, "find", lambda _: no_importance_weight
    ),
    "no cap": Plant("dense gradients", LOSSES, "find", lambda _: no_cap),
    "gradient through the weight": Plant(
        "TRL's loss and gradients", LOSSES, "find", lambda _: weight_with_gradient
    ),
    "depths in the pass": Plant("trees equal rows", trainer.packing, "trie_of", depths_in_the_pass),
    "a sibling is seen": Plant(
        "trees equal rows", trainer.packing, "plan_passes", lambda trie, _: [siblings_seen(trie)]
    ),
    "an ancestor pass is forgotten": Plant(
        "divided trees equal rows", trainer.packing, "plan_passes", ancestors_forgotten
    ),
    "a lost gradient of keys and values": Plant(
        "divided trees equal rows", TreePass, "collected", lambda _: ([], [])
    ),
    "one item for two rows": Plant(
        "trees equal rows", trainer.pass_runner, "tree_passes", one_item_an_edge
    ),
    "advantages averaged over an edge": Plant(
        "trees equal rows", trainer.pass_runner, "tree_passes", advantages_averaged
    ),
    "parts of attention weighted alike": Plant(
        "trees equal rows", torch, "sigmoid", shares_of_equals
    ),
    "rows numbered by their pass": Plant(
        "divided weights", trainer.pass_runner, "in_common", numbered_by_pass
    ),
    "no proximal policy": Plant("several updates", trainer.policy, "with_values", no_proximal),
    "N of the whole batch": Plant(
        "several updates", trainer.policy, "count_trained", lambda rows: 200
    ),
    "sums over a row": Plant(
        "inputs of several updates", trainer.policy, "with_sequence_means", sums_instead
    ),
    "entropies of one row": Plant(
        "tokens of high entropy", trainer.policy, "with_high_entropies", choice_of_each_row
    ),
    "products of another row": Plant(
        "inputs of several updates", trainer.policy, "with_sequence_products", of_the_next_row
    ),
    "VESPO's signs are swapped": Plant(
        "VESPO's formula",
        *(LOSSES, "find"),
        lambda _: PolicyLoss(weight_of_the_other_sign, sequence_product=True),
    ),
    "VESPO's signs are swapped, against TRL": Plant(
        "TRL's VESPO",
        *(LOSSES, "find"),
        lambda _: PolicyLoss(weight_of_the_other_sign, sequence_product=True),
    ),
    "VESPO without its decay": Plant(
        "VESPO's formula",
        *(LOSSES, "find"),
        lambda _: PolicyLoss(weight_without_decay, sequence_product=True),
    ),
    "VESPO weighs tokens as well": Plant(
        "TRL's VESPO", LOSSES, "find", lambda _: PolicyLoss(original_vespo)
    ),
    "clipped at one side": Plant(
        "the dual clip's formula",
        *(trainer.surrogates, "_clipped"),
        lambda ratio, a, config: _clipped(ratio, a, replace(config, dual_clip=None)),
    ),
    "rows of all signs are dropped": Plant(
        "rows off policy", trainer.loss, "off_policy", every_sign
    ),
    "the updates are no divergence": Plant(
        "rows off policy", trainer.loss, "off_policy", since_the_proximal
    ),
    "no lower bound": Plant(
        "two bounds of weights",
        *(trainer.loss, "importance_weight"),
        lambda p, inputs, config: original_weight(p, inputs, replace(config, is_floor=0.0)),
    ),
    "the unbiased k3 without its linear part": Plant(
        "the unbiased k3's formula", trainer.loss, "kl_term", kl_without_its_linear_part
    ),
    "the whole divergence for each token": Plant(
        "returns of tokens", trainer.batch, "with_returns", lambda row, d, factor: row
    ),
    "a token's own divergence given back": Plant(
        "returns of tokens", trainer.batch, "with_returns", own_divergence_given_back
    ),
    "a reward for divergence": Plant(
        "returns of tokens", trainer.batch, "found_divergences", divergence_of_the_other_sign
    ),
    "no divergence in the reward, against TRL": Plant(
        "TRL's RLOO with its KL",
        *(tests.trainer.test_trl, "less_divergence"),
        lambda rewards, *_: rewards,
    ),
    "moments are not undone": Plant("a step is undone", Snapshot, "restore", weights_alone),
    "nothing is undone": Plant("a step is undone", Snapshot, "restore", lambda before: None),
    "the wrong sign": Plant("dense gradients", LOSSES, "find", lambda _: flipped_advantages),
    "a token's ratio for the row's": Plant(
        "GSPO's formula", LOSSES, "find", lambda _: PolicyLoss(ratio_of_tokens)
    ),
    "a token's ratio for the row's, against TRL": Plant(
        "TRL's GSPO", LOSSES, "find", lambda _: PolicyLoss(ratio_of_tokens)
    ),
    "a row's ratio without gradient": Plant(
        "GSPO's formula", LOSSES, "find", lambda _: PolicyLoss(ratio_without_gradient)
    ),
    "CISPO's weight moves": Plant(
        "CISPO's formula", LOSSES, "find", lambda _: PolicyLoss(moving_weight)
    ),
    "CISPO drops clipped tokens": Plant(
        "CISPO's formula", LOSSES, "find", lambda _: PolicyLoss(clipped_token)
    ),
    "REINFORCE clips": Plant(
        "REINFORCE's formula", LOSSES, "find", lambda _: PolicyLoss(clipped_token)
    ),
    "REINFORCE forgets pi_prox": Plant(
        "REINFORCE's formula", LOSSES, "find", lambda _: PolicyLoss(stale_ratio)
    ),
    "SAPO's temperatures are swapped": Plant(
        "SAPO's formula", LOSSES, "find", lambda _: PolicyLoss(gate_of_the_other_sign)
    ),
    "k2 without its half": Plant("k2's formula", trainer.loss, "kl_term", kl_without_half),
    "k3 without its linear part": Plant(
        "k3's formula", trainer.loss, "kl_term", kl_without_its_linear_part
    ),
    "k3 without its linear part, against TRL": Plant(
        "TRL's CISPO with KL and entropy", trainer.loss, "kl_term", kl_without_its_linear_part
    ),
    "masked weights are truncated": Plant(
        "masked weights' formula", trainer.loss, "importance_weight", never_masked
    ),
    "a token's weight for the row's": Plant(
        "weights of rows", trainer.loss, "importance_weight", always_of_tokens
    ),
    "the importance weight on all terms": Plant(
        "the formula of all terms", PolicyLoss, "__call__", weight_of_all_terms
    ),
    "no weights of tokens": Plant("TRL's Dr.GRPO", LossInputs, "of", no_token_weights),
    "entropies without gradient": Plant(
        "TRL's CISPO with KL and entropy",
        trainer.logprobs,
        "_label_logprobs",
        entropies_without_gradient,
    ),
    "the own score in the baseline": Plant(
        "leave one out", trainer.advantage, "_mean_of_others", mean_of_all
    ),
    "the own score in the baseline, against TRL": Plant(
        "TRL's RLOO", trainer.advantage, "_mean_of_others", mean_of_all
    ),
    "the deviation of a population": Plant(
        "the batch's mean", trainer.advantage, "_mean_and_std", population_deviation
    ),
    "dropped groups in the batch's deviation": Plant(
        "the batch's deviation", trainer.advantage, "_pools", dropped_groups_counted
    ),
    "dropped groups in the batch's mean": Plant(
        "the group's mean and the batch", trainer.advantage, "_pools", dropped_groups_counted
    ),
    "sessions counted once a row": Plant(
        "the mean over sessions", trainer.batch, "weighted", weights_of_each_row
    ),
    "a constant length for each row": Plant(
        "the constant length", trainer.batch, "weighted", weights_of_each_row
    ),
    "rows counted once a session": Plant(
        "the mean over rows", trainer.batch, "weighted", weights_of_sessions
    ),
    "a penalty above the length": Plant(
        "long outputs", trainer.batch, "overlong_penalty", penalty_above_the_length
    ),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.service
def test_the_law_holds(law: str) -> None:
    LAWS[law]()


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.service
def test_the_law_catches(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law, owner, name, error = PLANTS[plant]
    monkeypatch.setattr(owner, name, error)
    with pytest.raises(AssertionError):
        LAWS[law]()


def test_counting_versions_instead_of_steps_is_caught() -> None:
    """The wrong version: age as a difference of versions, not of the steps they were made at."""
    original = trainer.rows.mask_stale

    def by_version(row: Any, *, step_of_version: Any, step: int, eta: int) -> Any:
        newest = max(step_of_version)
        same = {v: v for v in step_of_version}
        return original(row, step_of_version=same, step=newest, eta=eta)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setitem(staleness_law.__globals__, "mask_stale", by_version)
        staleness_law()
