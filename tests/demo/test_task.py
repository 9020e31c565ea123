"""The demo's prompts: disjoint splits, one digit each."""

from __future__ import annotations

import pytest

from any_agent.demo.task import is_correct, items, messages, shuffled


def test_the_splits_share_no_prompt() -> None:
    train, held_out = items(held_out=False), items(held_out=True)
    assert (len(train), len(held_out)) == (480, 120)
    assert len({i.prompt for i in train + held_out}) == 600
    assert len({i.task_id for i in train + held_out}) == 600


@pytest.mark.parametrize("held_out", [False, True])
def test_each_prompt_holds_its_digit_and_no_other(held_out: bool) -> None:
    split = items(held_out=held_out)
    assert all([c for c in i.prompt if c.isdigit()] == [i.digit] for i in split)
    assert len({sum(i.digit == str(d) for i in split) for d in range(10)}) == 1


def test_only_the_digit_is_correct() -> None:
    item = items(held_out=False)[3]
    assert is_correct(f" {item.digit}\n", item)
    wrong = str((int(item.digit) + 1) % 10)
    assert not any(is_correct(a, item) for a in (None, "", wrong, item.digit * 2))


def test_messages_end_with_the_prompt() -> None:
    item = items(held_out=True)[0]
    assert [m["role"] for m in messages(item)] == ["system", "user"]
    assert messages(item)[-1]["content"] == item.prompt


def test_shuffled_is_seeded_and_leaves_its_input_alone() -> None:
    split = items(held_out=True)
    before = list(split)
    assert shuffled(split, 1) == shuffled(split, 1) != shuffled(split, 2)
    assert split == before and sorted(shuffled(split, 1), key=split.index) == split
