"""The demo's prompts: disjoint splits, one digit each."""

from __future__ import annotations

import pytest

from any_agent.demo.task import SUMS, is_correct, is_sum, items, messages, sums


def test_the_splits_share_no_prompt_and_each_prompt_holds_its_digit_alone() -> None:
    train, held_out = items(held_out=False), items(held_out=True)
    assert (len(train), len(held_out)) == (480, 120)
    assert len({i.prompt for i in train + held_out}) == 600
    assert len({i.task_id for i in train + held_out}) == 600
    assert all([c for c in i.prompt if c.isdigit()] == [i.answer] for i in train + held_out)
    assert len({sum(i.answer == str(d) for i in held_out) for d in range(10)}) == 1


def test_only_the_digit_is_correct() -> None:
    item = items(held_out=False)[3]
    assert is_correct(f" {item.answer}\n", item)
    wrong = str((int(item.answer) + 1) % 10)
    assert not any(is_correct(a, item) for a in (None, "", wrong, item.answer * 2))


def test_no_sum_is_held_out_in_one_order_only() -> None:
    train, held_out = sums(held_out=False), sums(held_out=True)
    assert (len(train), len(held_out)) == (300, 61)
    assert len({item.prompt for item in train + held_out}) == len({i.task_id for i in train}) + 61
    pairs = [{frozenset(item.task_id.split("+")) for item in split} for split in (train, held_out)]
    assert not pairs[0] & pairs[1]
    for item in train + held_out:
        a, b = map(int, item.task_id.split("+"))
        assert (item.prompt, item.answer) == (f"What is {a} + {b}?", str(a + b))
        assert min(a, b) >= 2 and max(a, b) <= 20


@pytest.mark.parametrize(
    ("answer", "right"),
    [("12", True), ("7 + 5 = 12.", True), ("12, as 7 + 5", False), ("", False), (None, False)],
)
def test_the_last_number_of_an_answer_counts(answer: str | None, right: bool) -> None:
    item = next(item for item in sums(held_out=False) if item.answer == "12")
    assert is_sum(answer, item) is right


def test_a_task_without_a_system_prompt_sends_none() -> None:
    item = sums(held_out=True)[0]
    question = {"role": "user", "content": item.prompt}
    assert messages(item, "") == [question]
    assert messages(item, SUMS.system) == [{"role": "system", "content": SUMS.system}, question]
