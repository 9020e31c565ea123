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

import trainer.advantage
import trainer.logprobs
import trainer.packing
import trainer.policy
import trainer.trie
from tests.support.trainer.policies import (
    assert_same,
    dense_gradients,
    random_rows,
    small_policy,
    trainer_gradients,
)
from tests.trainer.test_advantage import worked_example
from tests.trainer.test_packing import staleness_law
from tests.trainer.test_tree import equals_rows
from tests.trainer.test_trl import loss_and_gradients_equal_trl
from trainer.advantage import SessionRewards
from trainer.loss import LOSSES, LossConfig, LossInputs
from trainer.packing import Batch, Pass, TrainedTokens
from trainer.tree_attention import TreePass
from trainer.trie import Block, NodePass, Trie


def dense_law() -> None:
    policy = small_policy(head_chunk=7)
    rows = random_rows(0)
    expected = dense_gradients(policy, rows, LossConfig())
    _, got = trainer_gradients(policy, rows, token_budget=60)
    assert_same(got, expected, atol=1e-10)


LAWS: dict[str, Callable[[], None]] = {
    "dense gradients": dense_law,
    "TRL's loss and gradients": loss_and_gradients_equal_trl,
    "the worked example": worked_example,
    "staleness": staleness_law,
    "trees equal rows": lambda: equals_rows("qwen3", 0, 10_000),
    "divided trees equal rows": lambda: equals_rows("qwen3", 0, 9),
}

grpo = LOSSES.find("grpo")
original_trained_tokens = trainer.packing.trained_tokens
original_label_logprobs = trainer.logprobs._label_logprobs
original_trie_of = trainer.trie.trie_of
original_whole_pass = trainer.trie.whole_pass
original_plan_passes = trainer.trie.plan_passes
original_tree_passes = trainer.packing.tree_passes


def no_shift(tokens: TrainedTokens) -> Tensor:
    return tokens.positions


def mask_shifted(batch: Batch) -> TrainedTokens:
    """The mask taken as if it spoke of the predicting position."""
    mask = batch["loss_mask"].roll(1, dims=1)
    mask[:, 0] = 0
    return original_trained_tokens(batch | {"loss_mask": mask * batch["attention_mask"]})


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


def depths_in_the_pass(*given: Any, **more: Any) -> Trie:
    """Positions counted through the pass, not from the root."""
    trie = original_trie_of(*given, **more)
    return replace(trie, depths=np.arange(len(trie.depths)))


def siblings_seen(trie: Trie) -> NodePass:
    """Causal over all tokens of the pass, as packed rows without their boundaries."""
    n = len(trie.tokens)
    return replace(original_whole_pass(trie), blocks=[Block(0, n, 0, n, causal=True)])


def ancestors_forgotten(trie: Trie, budget: int) -> list[NodePass]:
    plan = original_plan_passes(trie, budget)
    for one in plan:
        one.blocks = [block for block in one.blocks if block.level in (None, 0)]
    return plan


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


class Plant(NamedTuple):
    law: str
    owner: Any
    name: str
    error: Any


PLANTS = {
    "the label's own hidden state": Plant(
        "dense gradients", TrainedTokens, "sources", property(no_shift)
    ),
    "shifted mask": Plant("dense gradients", trainer.packing, "trained_tokens", mask_shifted),
    "shifted mask, against TRL": Plant(
        "TRL's loss and gradients", trainer.packing, "trained_tokens", mask_shifted
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
        "staleness", trainer.packing, "_too_old", lambda age, eta: age >= eta
    ),
    "staleness off by one, lenient": Plant(
        "staleness", trainer.packing, "_too_old", lambda age, eta: age > eta + 1
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
        "trees equal rows", trainer.policy, "tree_passes", one_item_an_edge
    ),
    "advantages averaged over an edge": Plant(
        "trees equal rows", trainer.policy, "tree_passes", advantages_averaged
    ),
    "parts of attention weighted alike": Plant(
        "trees equal rows", torch, "sigmoid", shares_of_equals
    ),
    "the wrong sign": Plant("dense gradients", LOSSES, "find", lambda _: flipped_advantages),
}


@pytest.mark.parametrize("law", LAWS)
def test_the_law_holds(law: str) -> None:
    LAWS[law]()


@pytest.mark.parametrize("plant", PLANTS)
def test_the_law_catches(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law, owner, name, error = PLANTS[plant]
    monkeypatch.setattr(owner, name, error)
    with pytest.raises(AssertionError):
        LAWS[law]()


def test_counting_versions_instead_of_steps_is_caught() -> None:
    """The wrong version: age as a difference of versions, not of the steps they were made at."""
    original = trainer.packing.mask_stale

    def by_version(row: Any, *, step_of_version: Any, step: int, eta: int) -> Any:
        newest = max(step_of_version)
        same = {v: v for v in step_of_version}
        return original(row, step_of_version=same, step=newest, eta=eta)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setitem(staleness_law.__globals__, "mask_stale", by_version)
        staleness_law()
