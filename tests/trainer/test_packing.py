from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.errors import fails_with
from tests.support.trainer.policies import random_rows, row_of
from trainer.packing import micro_batches, padded_passes, tree_passes
from trainer.rows import Row, mask_stale, trained_positions, with_training_signal, with_values


def signalled(ids: list[int], mask: list[int]) -> Row:
    return with_training_signal(row_of(ids, mask), advantage=1.0, temperature=1.0)


def test_staleness_counts_steps_and_keeps_what_is_exactly_eta_old() -> None:
    """Versions 3, 4, 5 after steps 4, 5, 7; at step 7 with eta 2 only version 3 is too old."""
    row = row_of([9, 1, 2, 3], [0, 1, 1, 1], versions=[-1, 3, 4, 5])
    got = mask_stale(row, step_of_version={3: 4, 4: 5, 5: 7}, step=7, eta=2)
    assert got["loss_mask"].tolist() == [0, 0, 1, 1]
    assert row["loss_mask"].tolist() == [0, 1, 1, 1], "the row itself stays as it was"
    # Tokens from a history that was given up stay.
    given_up = mask_stale(row, step_of_version={3: 12, 4: 12, 5: 12}, step=10, eta=0)
    assert given_up["loss_mask"].tolist() == [0, 1, 1, 1]
    with fails_with(ValueError, "version 3"):
        mask_stale(row, step_of_version={4: 0}, step=0, eta=0)


def test_a_token_is_predicted_one_position_before_it() -> None:
    rows = [signalled([9, 1, 2, 3], [0, 0, 1, 1]), signalled([8, 5], [0, 1])]
    (one,) = padded_passes(rows, 64)
    assert one.ids.tolist() == [[9, 1, 2, 3], [8, 5, 0, 0]]
    assert one.items.sequences.tolist() == [0, 0, 1]
    assert one.items.positions.tolist() == [2, 3, 1]
    assert one.items.sources.tolist() == [1, 2, 4]
    assert one.items.labels.tolist() == [2, 3, 5]
    assert one.items.place(2) == "row 1, position 1"


def test_a_row_that_cannot_be_trained_on_is_refused() -> None:
    with fails_with(ValueError, "first token"):
        trained_positions(row_of([1, 2], [1, 1]))
    row = row_of([1, 2], [0, 1])
    with fails_with(ValueError, "padding"):
        trained_positions(row | {"attention_mask": torch.tensor([True, False])})
    for temperature in (0.0, -1.0, float("nan")):
        with fails_with(ValueError, "temperature"):
            with_training_signal(row, advantage=1.0, temperature=temperature)
    odd = signalled([1, 2], [0, 1]) | {"reference": torch.zeros(2)}
    for make in (tree_passes, padded_passes):
        with fails_with(ValueError, "reference"):
            make([signalled([1, 2], [0, 1]), odd], 64)
        with fails_with(ValueError, "greedy"):
            make([signalled([1, 2], [0, 1]) | {"temperatures": torch.tensor(0.0)}], 64)


def test_values_of_trained_tokens_are_put_at_their_positions() -> None:
    rows = [row_of([9, 1, 2, 3], [0, 1, 0, 1]), row_of([8, 5], [0, 0])]
    one, other = with_values(rows, "reference", [torch.tensor([-1.0, -2.0]), torch.zeros(0)])
    assert one["reference"].tolist() == [0, -1, 0, -2]
    assert other["reference"].tolist() == [0, 0]


def test_rows_are_counted_alike_in_both_kinds_of_passes() -> None:
    rows = [signalled([4, 5], [0, 1]), signalled([1, 2, 3], [0, 1, 1])]
    for make in (tree_passes, padded_passes):
        (one,) = make(rows, 64)
        assert one.items.sequences.tolist() == [1, 1, 0]
        assert one.items.labels.tolist() == [2, 3, 5]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 120))
def test_micro_batches_hold_every_trained_row_once_within_the_budget(
    seed: int, count: int, budget: int
) -> None:
    rows = random_rows(seed, count)
    rows[0]["loss_mask"] = torch.zeros_like(rows[0]["loss_mask"])
    batches = micro_batches(rows, budget)
    assert sorted(k for batch in batches for k in batch) == list(range(1, count))
    lengths = []
    for batch in batches:
        width = max(len(rows[k]["input_ids"]) for k in batch)
        assert len(batch) * width <= budget or len(batch) == 1
        lengths += [len(rows[k]["input_ids"]) for k in batch]
    assert lengths == sorted(lengths, reverse=True)
