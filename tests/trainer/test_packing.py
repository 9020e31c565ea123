from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.trainer.policies import random_rows
from trainer.packing import micro_batches, numbered, padded_pass, tree_passes
from trainer.rows import (
    Row,
    concat_padded_tensors,
    count_trained,
    mask_stale,
    trained_tokens,
    with_training_signal,
)


def row(ids: list[int], mask: list[int], versions: list[int] | None = None) -> Row:
    n = len(ids)
    return {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "loss_mask": torch.tensor(mask, dtype=torch.int32),
        "logprobs": torch.zeros(n),
        "versions": torch.tensor(versions or [-1] * n, dtype=torch.int32),
        "attention_mask": torch.ones(n, dtype=torch.bool),
        "rewards": torch.tensor(1.0),
    }


def staleness_law() -> None:
    """Versions 3, 4, 5 after steps 4, 5, 7; at step 7 with eta 2 only version 3 is too old."""
    got = mask_stale(
        row([9, 1, 2, 3], [0, 1, 1, 1], [-1, 3, 4, 5]),
        step_of_version={3: 4, 4: 5, 5: 7},
        step=7,
        eta=2,
    )
    assert got["loss_mask"].tolist() == [0, 0, 1, 1]


def test_staleness_counts_steps_and_keeps_what_is_exactly_eta_old() -> None:
    staleness_law()


def test_staleness_leaves_its_argument_alone_and_needs_known_versions() -> None:
    r = row([9, 1], [0, 1], [-1, 3])
    mask_stale(r, step_of_version={3: 0}, step=9, eta=0)
    assert r["loss_mask"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="version 3"):
        mask_stale(r, step_of_version={4: 0}, step=0, eta=0)


def test_tokens_from_a_history_that_was_given_up_stay() -> None:
    r = mask_stale(row([9, 1], [0, 1], [-1, 8]), step_of_version={8: 12}, step=10, eta=0)
    assert r["loss_mask"].tolist() == [0, 1]


def test_staleness_on_padded_batches() -> None:
    batch = concat_padded_tensors(
        [row([9, 1, 2], [0, 1, 1], [-1, 0, 1]), row([9, 1], [0, 1], [-1, 0])]
    )
    got = mask_stale(batch, step_of_version={0: 0, 1: 1}, step=1, eta=0)
    assert got["loss_mask"].tolist() == [[0, 0, 1], [0, 0, 0]]


def test_padding_values_and_types() -> None:
    batch = concat_padded_tensors(
        [row([9, 1, 2], [0, 1, 1], [-1, 0, 1]), row([9, 1], [0, 1], [-1, 0])]
    )
    assert batch["input_ids"].tolist() == [[9, 1, 2], [9, 1, 0]]
    assert batch["versions"].tolist() == [[-1, 0, 1], [-1, 0, -1]]
    assert batch["attention_mask"].tolist() == [[True] * 3, [True, True, False]]
    assert batch["rewards"].tolist() == [1.0, 1.0]
    types = {k: t.dtype for k, t in batch.items()}
    assert types == {k: t.dtype for k, t in row([1], [0]).items()}


def test_what_cannot_be_concatenated() -> None:
    with pytest.raises(ValueError, match="nothing"):
        concat_padded_tensors([])
    odd = row([1], [0])
    del odd["versions"]
    with pytest.raises(ValueError, match="versions is missing in some"):
        concat_padded_tensors([row([1], [0]), odd])


def test_a_token_is_predicted_one_position_before_it() -> None:
    batch = concat_padded_tensors([row([9, 1, 2, 3], [0, 0, 1, 1]), row([8, 5], [0, 1])])
    tokens = trained_tokens(batch)
    assert tokens.rows.tolist() == [0, 0, 1]
    assert tokens.positions.tolist() == [2, 3, 1]
    assert tokens.sources.tolist() == [1, 2, 0]
    assert tokens.labels.tolist() == [2, 3, 5]
    assert tokens.gather(batch["input_ids"]).tolist() == [2, 3, 5]
    assert tokens.spread(torch.tensor([0.5, 2.0])).tolist() == [0.5, 0.5, 2.0]
    assert tokens.place(2) == "row 1, position 1"


def test_batches_that_cannot_be_trained_on() -> None:
    first = concat_padded_tensors([row([1, 2], [1, 1])])
    with pytest.raises(ValueError, match="first token"):
        trained_tokens(first)
    padded = concat_padded_tensors([row([1, 2], [0, 1])])
    with pytest.raises(ValueError, match="covers padding"):
        trained_tokens(padded | {"attention_mask": torch.tensor([[True, False]])})
    with pytest.raises(ValueError, match="right only"):
        trained_tokens(padded | {"attention_mask": torch.tensor([[False, True]])})


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_greedy_rows_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        with_training_signal(row([1, 2], [0, 1]), advantage=1.0, temperature=temperature)


def test_rows_without_numbers_are_counted() -> None:
    rows = [
        with_training_signal(row(ids, [0, 1, 1]), advantage=1.0, temperature=1.0)
        for ids in ([1, 2, 3], [4, 5, 6])
    ]
    (tree,) = tree_passes(rows, 64)
    padded = padded_pass(concat_padded_tensors(rows)).items
    assert padded.sequences.tolist() == tree.items.sequences.tolist() == [0, 0, 1, 1]
    assert padded.labels.tolist() == tree.items.labels.tolist() == [2, 3, 5, 6]
    named = padded_pass(concat_padded_tensors(numbered(rows)[::-1])).items
    assert named.sequences.tolist() == [1, 1, 0, 0]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 120))
def test_micro_batches_hold_every_trained_row_once_within_the_budget(
    seed: int, count: int, budget: int
) -> None:
    rows = random_rows(seed, count)
    rows[0]["loss_mask"] = torch.zeros_like(rows[0]["loss_mask"])
    batches = micro_batches(rows, budget)
    assert count_trained(batches) == count_trained(rows)
    got = [float(a) for batch in batches for a in batch["advantages"]]
    assert sorted(got) == sorted(float(r["advantages"]) for r in rows[1:])
    lengths = []
    for batch in batches:
        height, width = batch["input_ids"].shape
        assert height * width <= budget or height == 1
        assert width == int(batch["attention_mask"].sum(-1).max())
        lengths.extend(batch["attention_mask"].sum(-1).tolist())
    assert lengths == sorted(lengths, reverse=True)
