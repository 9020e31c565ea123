"""Rows are divided among processes whole, once, and about evenly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trainer.policies import row_of
from tests.support.trainer.trees import tree_rows
from trainer.packing import balanced, balanced_tries, idle_pass, in_common, tree_passes, tree_shape
from trainer.rows import Row


def _row(ids: Sequence[int]) -> Row:
    """A row that trains on its last token."""
    return row_of(ids, [0] * (len(ids) - 1) + [1]) | {"temperatures": torch.ones(len(ids))}


@given(st.lists(st.integers(2, 400), max_size=40), st.integers(1, 8))
def test_every_row_has_one_place_and_no_part_much_more_than_its_share(
    lengths: list[int], parts: int
) -> None:
    rows = [_row(range(n)) for n in lengths]
    without_loss = row_of(range(9), [0] * 9)
    divided = balanced([without_loss, *rows], parts)
    assert len(divided) == parts
    assert sorted(id(row) for part in divided for row in part) == sorted(map(id, rows))
    loads = [sum(row["input_ids"].shape[0] for row in part) for part in divided]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    again = balanced([without_loss, *rows], parts)
    assert [[id(r) for r in part] for part in again] == [[id(r) for r in part] for part in divided]


@given(st.integers(0, 1000), st.integers(1, 5))
def test_neighbours_in_the_tree_stay_together_and_every_row_has_one_place(
    seed: int, parts: int
) -> None:
    rows = tree_rows(seed)
    divided = balanced_tries(rows, parts)
    assert sorted(id(row) for part in divided for row in part) == sorted(map(id, rows))
    assert len(divided) == parts


def _computed(rows: Sequence[Row], processes: int, budget: int) -> list[int]:
    """The tokens that each process computes, idle passes left out."""
    parts = balanced_tries(rows, processes)
    return [sum(one.ids.numel() for one in tree_passes(part, budget)) for part in parts]


def test_the_turns_of_an_episode_above_the_budget_are_computed_once() -> None:
    # Turn k has the first 32 k - 1 tokens; no row trains on what follows its last token.
    turns = [_row(range(32 * k - 1)) for k in range(1, 101)]
    other = _row([5000] * 40)
    for processes in (1, 2, 3):
        assert sum(_computed([*turns, other], processes, 1024)) == 3198 + 39


def test_episodes_and_groups_are_computed_once_in_any_number_of_processes() -> None:
    """Eight groups of eight samples, each behind a prompt of its own, and one that all share."""
    rows = [
        _row([*range(20), *[1000 * g] * 100, *(1000 * g + 10 * k + t for t in range(1, 9))])
        for g in range(8)
        for k in range(8)
    ]
    for processes in (2, 4):
        computed = _computed(rows, processes, 256)
        once = sum(_computed(rows, 1, 256))
        assert sum(computed) == once + 20 * (processes - 1)
        assert max(computed) <= 1.05 * sum(computed) / processes


def test_one_group_is_divided_where_its_answers_are_longer_than_its_prompt() -> None:
    def group(prompt: int, answer: int) -> list[Row]:
        return [_row([*range(prompt), *[1000 + k] * answer]) for k in range(8)]

    assert sorted(map(len, balanced_tries(group(50, 40), 2))) == [4, 4]
    assert sorted(map(len, balanced_tries(group(50, 4), 2))) == [0, 8]


def test_processes_have_equally_many_distinct_tokens() -> None:
    """A group of four sessions with 73 tokens weighs as much as any of three rows."""
    group = [[1, *([1] * 60), k, 1, 2] for k in range(5, 9)]
    long = [[k, *range(5, 77)] for k in (2, 3, 4)]
    rows = [_row(ids) for ids in [*group, *long]]
    assert sorted(len(part) for part in balanced_tries(rows, 2)) == [2, 5]


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 60))
def test_each_pass_of_each_process_has_one_place_within_what_it_descends_from(
    seed: int, processes: int, budget: int
) -> None:
    plans = [tree_passes(part, budget) for part in balanced_tries(tree_rows(seed), processes)]
    shapes = [tree_shape(part, budget) for part in balanced_tries(tree_rows(seed), processes)]
    assert [[one.parent for one in plan] for plan in plans] == shapes
    every = [in_common(plan, shapes, k) for k, plan in enumerate(plans)]
    assert len({tuple((one.around, one.keeps) for one in plan) for plan in every}) == 1
    deepest = max(_depth(one.parent for one in plan) for plan in plans)
    for plan, laid in zip(plans, every, strict=True):
        planned = {id(one.ids): one for one in plan}
        assert sorted(id(one.ids) for one in laid if one.depths is not None) == sorted(planned)
        for place, one in enumerate(laid):
            assert len(one.items), "each process takes part in gathering the head"
            around = [one.around]
            while around[-1] >= 0:
                around.append(laid[around[-1]].around)
            assert max(around) < place
            assert len(around) <= deepest, "no more are retained than by the deepest tree"
            if one.depths is None:
                assert not one.items.inputs, "idle"
            elif one.parent >= 0:
                assert one.parent in around
                assert laid[one.parent].ids is plan[planned[id(one.ids)].parent].ids


def _depth(parents: Iterable[int]) -> int:
    """The depth of a forest whose nodes follow their parents; -1 is none."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


def test_many_short_tries_beside_each_other_are_not_nested() -> None:
    """Each is a chain of two or three passes, of which another process's could begin in between."""
    short = [number - 1 if number % 2 else -1 for number in range(200)]
    one = [-1, 0, 1, *(parent + 3 if parent >= 0 else -1 for parent in short)]
    passes = [replace(idle_pass(), parent=parent) for parent in one]
    laid = in_common(passes, [one, short], 0)
    assert _depth(place.around for place in laid) == 3
    assert len(laid) < 1.05 * len(one)


def test_a_chain_beside_branches_makes_no_process_wait() -> None:
    for length in (1, 5, 50):
        chain, branches = list(range(-1, length - 1)), [-1] * length
        passes = [replace(idle_pass(), parent=k) for k in branches]
        assert len(in_common(passes, [chain, branches], 1)) == length
        assert len(in_common(passes, [[], branches], 1)) == length
