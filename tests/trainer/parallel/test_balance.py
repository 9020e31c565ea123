"""Rows are divided among processes whole, once, and about evenly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trainer.trees import tree_rows
from trainer.packing import balanced, balanced_tries, idle_batch, shared_parts, tree_passes
from trainer.rows import Row


def _row(length: int, trained: bool = True) -> Row:
    mask = torch.zeros(length, dtype=torch.int32)
    mask[-1] = int(trained)
    return {"input_ids": torch.zeros(length, dtype=torch.int32), "loss_mask": mask}


def _row_of(ids: Sequence[int]) -> Row:
    whole = {
        "attention_mask": torch.ones(len(ids), dtype=torch.bool),
        "temperatures": torch.ones(len(ids)),
    }
    return _row(len(ids)) | whole | {"input_ids": torch.tensor(ids, dtype=torch.int32)}


@given(st.lists(st.integers(2, 400), max_size=40), st.integers(1, 8))
def test_every_row_has_one_place_and_no_part_much_more_than_its_share(
    lengths: list[int], parts: int
) -> None:
    rows = [_row(n) for n in lengths]
    divided = balanced(rows, parts)
    assert len(divided) == parts
    assert sorted(id(row) for part in divided for row in part) == sorted(map(id, rows))
    loads = [sum(row["input_ids"].shape[0] for row in part) for part in divided]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_rows_without_a_loss_are_left_out() -> None:
    kept = _row(5)
    assert balanced([_row(9, trained=False), kept], 2) == [[kept], []]


def test_equal_rows_are_always_divided_alike() -> None:
    rows = [_row(7) for _ in range(5)]
    first, second = balanced(rows, 2), balanced(rows, 2)
    assert [[id(r) for r in part] for part in first] == [[id(r) for r in part] for part in second]


def test_what_an_idle_process_runs_trains_one_token() -> None:
    batch = idle_batch()
    assert int(batch["loss_mask"].sum()) == 1
    assert not batch["loss_mask"][0, 0]


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 60))
def test_neighbours_in_the_tree_stay_together_and_every_row_has_one_place(
    seed: int, parts: int, budget: int
) -> None:
    rows = tree_rows(seed)
    divided = balanced_tries(rows, parts, budget)
    assert sorted(id(row) for part in divided for row in part) == sorted(map(id, rows))
    assert len(divided) == parts
    for part in divided:
        for one in shared_parts(part, budget):
            (computed,) = tree_passes(one, budget, divided=False)
            longest = max(row["input_ids"].shape[0] for row in one)
            assert computed.ids.numel() <= max(budget, longest)


def test_the_turns_of_an_episode_above_the_budget_are_computed_once() -> None:
    # Turn k has the first 32 k - 1 tokens.
    turns = [_row_of(range(32 * k - 1)) for k in range(1, 101)]
    other = _row_of([5000] * 40)
    for processes in (1, 2, 3):
        computed = [
            one.ids.numel()
            for part in balanced_tries([*turns, other], processes, 1024)
            for each in shared_parts(part, 1024)
            for one in tree_passes(each, 1024, divided=False)
        ]
        assert sum(computed) == 3198 + 39, "no row trains on what follows its last token"


def test_processes_have_equally_many_distinct_tokens() -> None:
    """A group of four sessions with 73 tokens weighs as much as any of three rows."""
    group = [[1, *([1] * 60), k, 1, 2] for k in range(5, 9)]
    long = [[k, *range(5, 77)] for k in (2, 3, 4)]
    rows = [_row_of(ids) for ids in [*group, *long]]
    assert sorted(len(part) for part in balanced_tries(rows, 2, 80)) == [2, 5]
