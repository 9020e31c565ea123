from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from any_agent.config import TrainConfig
from any_agent.errors import InvalidTrajectory
from any_agent.record import InteractionTree, InteractionWithTokenLogpReward, propagate_rewards
from any_agent.types import SampledSession, Trajectory
from any_agent.workflow import checked_tensors, concat_padded_tensors, kind_of, rows_of, tensors_of
from tests.support.errors import fails_with
from tests.support.workflow.tensors import interaction, tensors
from trainer.batch import training_batch, versions_in
from trainer.rows import count_trained, trained_positions


def conversation() -> list[Any]:
    """A root and the turn that goes on from it."""
    root = interaction("a", [1, 2], [3, 4])
    child = interaction("b", [5], [6], parent="a", reward=1.0)
    return [root, child]


def exported(style: str, discount: float = 0.5) -> dict[str, InteractionWithTokenLogpReward]:
    tree = InteractionTree.from_interactions(conversation())
    return InteractionWithTokenLogpReward.of_tree(
        tree, propagate_rewards(tree, discount=discount), style
    )


def test_other_widths_become_the_documented_ones() -> None:
    """As Python's own numbers make them: int64, float64, masks of any kind."""
    right = tensors([1, 2, 3, 4], [1, 2, 3])
    wide = {
        "input_ids": right["input_ids"].long(),
        "attention_mask": right["attention_mask"].float(),
        "loss_mask": right["loss_mask"].bool(),
        "logprobs": right["logprobs"].double(),
        "versions": right["versions"].long(),
        "rewards": right["rewards"].long(),
    }
    checked = checked_tensors(wide)
    assert {n: v.dtype for n, v in checked.items()} == {n: v.dtype for n, v in right.items()}
    assert all(checked[name].equal(right[name]) for name in right)
    as_numpy = checked_tensors({name: value.numpy() for name, value in right.items()})
    assert {n: v.dtype for n, v in as_numpy.items()} == {n: v.dtype for n, v in right.items()}
    assert all(checked_tensors(right)[name] is right[name] for name in right)
    for (row, _), (same, _) in zip(rows_of(wide), rows_of(right), strict=True):
        assert all(np.array_equal(row[name], same[name]) for name in same)
        assert {n: v.dtype for n, v in row.items()} == {n: v.dtype for n, v in same.items()}
    together = concat_padded_tensors([wide, right])
    assert checked_tensors(together)["input_ids"].dtype == torch.int32


def test_fields_that_only_training_needs_may_be_missing_until_then() -> None:
    given = tensors([1, 2, 3], loss_mask=None, logprobs=None, versions=None, rewards=None)
    assert set(checked_tensors(given)) == {"input_ids", "attention_mask"}
    with fails_with(InvalidTrajectory, param="loss_mask"):
        rows_of(given)


WRONG: list[tuple[str, Any, str]] = [
    ("input_ids", None, "attention_mask"),
    ("attention_mask", None, "missing"),
    ("input_ids", torch.tensor([[1.0, 2, 3]]), ".to(torch.int32"),
    ("input_ids", torch.tensor([[1, 2, 1 << 31]]), "2147483648 in row 0, position 2"),
    ("input_ids", torch.tensor([1, 2, 3], dtype=torch.int32), "unsqueeze(0)"),
    ("input_ids", torch.zeros((1, 0), dtype=torch.int32), "[1, 0]"),
    ("input_ids", torch.tensor([[1, -2, 3]], dtype=torch.int32), "-2 in row 0, position 1"),
    ("input_ids", [[1, 2, 3]], "a list of 1"),
    ("attention_mask", torch.tensor([[1, 1, 0.5]]), "0.5 in row 0, position 2"),
    ("attention_mask", torch.tensor([[1, 1, torch.nan]]), "nan in row 0, position 2"),
    ("loss_mask", torch.tensor([[0, 0, -1]]), "-1 in row 0, position 2"),
    ("attention_mask", torch.tensor([[0, 1, 1]]).bool(), "row"),
    ("attention_mask", torch.tensor([[1, 0, 1]]).bool(), "row 0, position 2"),
    ("loss_mask", torch.tensor([[0, 0, 2]], dtype=torch.int32), "2 in row 0, position 2"),
    ("loss_mask", torch.tensor([[1, 0, 1]], dtype=torch.int32), "first token"),
    ("loss_mask", torch.zeros((1, 4), dtype=torch.int32), "[1, 4]: it must be [1, 3]"),
    ("loss_mask", torch.zeros(3, dtype=torch.int32), "[3]: it must be [1, 3]"),
    ("logprobs", torch.zeros((1, 3), dtype=torch.float16), "float16: it must be float32"),
    ("logprobs", torch.zeros((1, 3), dtype=torch.bool), "bool: it must be float32"),
    ("logprobs", torch.tensor([[0, 0, -1e300]], dtype=torch.float64), "-inf"),
    ("versions", torch.tensor([[-1, -1, 1 << 40]]), "1099511627776"),
    ("logprobs", torch.zeros((1, 3), dtype=torch.bfloat16), "torch.bfloat16"),
    ("logprobs", torch.tensor([[0, 0, torch.nan]]), "nan in row 0, position 2"),
    ("logprobs", torch.tensor([[0, 0, -torch.inf]]), "-inf"),
    ("logprobs", torch.tensor([[0, 0, 0.7]]), "0.7 in row 0, position 2"),
    ("versions", torch.tensor([[-1, -1, -1]], dtype=torch.int32), "loss_mask"),
    ("rewards", torch.tensor([torch.nan]), "nan in row 0"),
    ("rewards", torch.tensor([1e7]), "1e+07"),
    ("rewards", torch.tensor(1.0), "[]: it must be [1]"),
    ("rewards", torch.tensor([[1.0]]), "[1, 1]"),
    ("rewards", 1.0, "float '1.0'"),
    ("temperatures", torch.tensor([0.0]), "0 in row 0"),
    ("mine", torch.zeros(2, 3), "[2, 3]"),
    ("mine", "text", "str 'text'"),
]


@pytest.mark.parametrize(("field", "value", "says"), WRONG)
def test_an_error_names_the_field_and_the_fix(field: str, value: Any, says: str) -> None:
    with fails_with(InvalidTrajectory, says, param=field):
        checked_tensors(tensors([1, 2, 3], **{field: value}))


def test_a_loss_on_padding_or_newer_weights_than_exist_are_refused() -> None:
    given = tensors([1, 2, 3, 4], [1, 2, 3])
    assert len(rows_of(given, newest=3)) == 2
    given["versions"][1, 2] = 9
    with fails_with(InvalidTrajectory, "has 9", "newest weights are 3", param="versions"):
        rows_of(given, newest=3)
    # What is not trained on may say what it likes.
    given["loss_mask"][1] = 0
    assert len(rows_of(given, newest=3)) == 2
    given["loss_mask"][1, 3] = 1
    with fails_with(InvalidTrajectory, "row 1, position 3"):
        checked_tensors(given)


def test_anything_else_than_the_documented_forms_is_refused() -> None:
    for result in (1.0, "text", [1], {"c": 1, **exported("individual")}, (1, 2), object()):
        with fails_with(InvalidTrajectory, "dictionary of tensors"):
            kind_of(result)
    for empty in ({}, [], [Trajectory("s", "g", [])]):
        with fails_with(InvalidTrajectory, "no model call"):
            tensors_of(empty)


def test_rows_of_an_episode_have_no_padding() -> None:
    given = tensors([1, 2, 3, 4], [1, 2, 3], reward=0.5, temperatures=torch.tensor([0.5, 2.0]))
    rows = rows_of(given)
    given["input_ids"][0, 0] = 99  # of another memory
    assert [row["input_ids"].tolist() for row, _ in rows] == [[1, 2, 3, 4], [1, 2, 3]]
    row, temperature = rows[1]
    assert {n: (v.dtype.name, v.shape) for n, v in row.items()} == {
        "input_ids": ("int32", (3,)),
        "loss_mask": ("int32", (3,)),
        "logprobs": ("float32", (3,)),
        "versions": ("int32", (3,)),
        "attention_mask": ("bool", (3,)),
        "rewards": ("float32", ()),
    }
    assert float(row["rewards"]) == 0.5
    assert temperature == 2.0


def test_interactions_and_trajectories_are_rows_with_what_ran_back() -> None:
    rows = rows_of(exported("individual"), discount=0.1)
    assert [row["input_ids"].tolist() for row, _ in rows] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    assert [row["loss_mask"].tolist() for row, _ in rows] == [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1]]
    # Their own discount applied; the one given here is for trajectories.
    assert [(float(row["rewards"]), t) for row, t in rows] == [(0.5, 0.7), (1.0, 0.7)]
    ((row, _),) = rows_of(exported("concat"))
    assert row["loss_mask"].tolist() == [0, 0, 1, 1, 0, 1]
    rows = rows_of([Trajectory("s", "g", conversation())], discount=0.9)
    assert [float(row["rewards"]) for row, _ in rows] == pytest.approx([0.9, 1.0])
    assert [t for _, t in rows] == [0.7, 0.7]


def test_a_wrong_reward_names_its_interaction() -> None:
    result = exported("individual")
    result["b"].reward = float("nan")
    with fails_with(InvalidTrajectory, "interaction b", param="rewards"):
        rows_of(result)
    episode = [Trajectory("s", "g", conversation(), final_reward=float("nan"))]
    with fails_with(InvalidTrajectory, "interaction a", param="rewards"):
        rows_of(episode)


def test_a_reward_that_was_changed_after_the_export_is_the_one_trained_on() -> None:
    exported = {name: value[0] for name, value in tensors([1, 2, 3], reward=1.0).items()}
    one = InteractionWithTokenLogpReward.from_tensors("c", exported)
    one.reward = 0.25
    ((row, _),) = rows_of({"c": one})
    assert (float(row["rewards"]), float(one.to_tensor_dict()["rewards"])) == (0.25, 0.25)


def test_batches_are_concatenated_and_padded() -> None:
    one = tensors([1, 2, 3], extra=torch.ones(1, 3, 2))
    two = tensors([1, 2, 3, 4, 5], [7, 8, 9], reward=0.0, extra=torch.ones(2, 5, 2))
    both = concat_padded_tensors([one, two])
    assert both["input_ids"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5], [7, 8, 9, 0, 0]]
    assert both["versions"][0].tolist() == [-1, -1, 3, -1, -1]
    assert both["rewards"].tolist() == [1.0, 0.0, 0.0]
    assert both["extra"].shape == (3, 5, 2)
    assert {n: v.dtype for n, v in both.items()} == {n: v.dtype for n, v in one.items()}
    checked_tensors(both)
    assert concat_padded_tensors([]) == {}
    with fails_with(InvalidTrajectory, param="mine"):
        concat_padded_tensors([tensors([1, 2, 3]), tensors([1, 2, 3], mine=torch.ones(1))])


SHAPES = st.sampled_from([(), (1,), (2,), (1, 3), (2, 3), (3, 2), (1, 3, 1), (0, 3), (2, 0)])
TYPES = st.sampled_from([torch.int32, torch.int64, torch.float32, torch.bool, torch.float64])
VALUES = st.sampled_from([0, 1, -1, 2, 2**31 - 1, float("nan"), float("-inf"), -0.5])
JUNK = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))


@st.composite
def hostile(draw: st.DrawFn) -> dict[Any, Any]:
    """What a workflow may return by mistake: right fields, of which some are something else."""
    given: dict[Any, Any] = tensors([1, 2, 3], [1, 2])
    names = st.sampled_from([*given, "temperatures", "mine", 7])
    for name in draw(st.lists(names, max_size=4)):
        if draw(st.booleans()):
            given[name] = draw(JUNK)
            continue
        kind = draw(TYPES)
        value = draw(VALUES)
        if not kind.is_floating_point:
            value = int(value) if np.isfinite(value) else 1
        given[name] = torch.full(draw(SHAPES), value, dtype=torch.float64).to(kind)
    return given


@drawn(hostile())
@settings(max_examples=100, deadline=None)
def test_whatever_is_returned_is_refused_by_name_or_can_be_trained_on(result: Any) -> None:
    try:
        rows = rows_of(result, newest=2**31 - 1)
    except InvalidTrajectory as error:
        assert str(error)
        return
    session = SampledSession("s", "g", [row for row, _ in rows], [t for _, t in rows])
    versions = versions_in([[session]])
    batch = training_batch(
        [[session]],
        TrainConfig(),  # type: ignore[call-arg]
        step=0,
        eta=0,
        step_of_version=dict.fromkeys(versions, 0),
    )
    for row in batch.rows:
        assert len(trained_positions(row)) == count_trained([row]) > 0


def test_the_example_of_areals_documents_passes() -> None:
    example = tensors([1, 2, 3, 4, 5]) | {
        "logprobs": torch.tensor([[0.0, 0.0, -0.5, -0.3, -0.2]]),
        "versions": torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32),
    }
    ((row, _),) = rows_of(checked_tensors(example))
    assert row["versions"].tolist() == [0, 0, 1, 1, 1]
