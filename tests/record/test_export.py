from __future__ import annotations

import json

import numpy as np
import pytest

from any_agent.errors import InvalidRequest, Unprocessable
from any_agent.record import (
    InteractionTree,
    concat_rows,
    export_rows,
    individual_rows,
    interaction_row,
    propagate_rewards,
    to_json,
)
from any_agent.types import Continuation
from tests.support.errors import fails_with
from tests.support.records import Make

DTYPES = {
    "input_ids": np.int32,
    "loss_mask": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "attention_mask": np.bool_,
    "rewards": np.float32,
}


@pytest.fixture
def tree(make: Make) -> InteractionTree:
    return InteractionTree.from_interactions(
        [
            make("a", prompt=[1, 2], output=[3, 4], reward=0.5),
            make("b.0", "a", asked="q", prompt=[5], output=[6]),
            make("b.1", "a", asked="q", prompt=[5], output=[7]),
            make("c", "b.1", prompt=[8], output=[9], untrainable_reason="grammar"),
            make("d", "a", prompt=[10], output=[11, 12]),
        ]
    )


def test_one_interaction_is_one_row_of_its_own_tokens(tree: InteractionTree) -> None:
    row = interaction_row(tree, "b.1", 2.0)
    assert {k: v.dtype.type for k, v in row.items()} == DTYPES
    assert to_json(row) == {
        "input_ids": [1, 2, 3, 4, 5, 7],
        "loss_mask": [0, 0, 0, 0, 0, 1],
        "logprobs": [0.0, 0.0, 0.0, 0.0, 0.0, -0.125],
        "versions": [-1, -1, -1, -1, -1, 7],
        "attention_mask": [True] * 6,
        "rewards": 2.0,
    }
    json.dumps(to_json(row))


def test_tokens_that_a_grammar_decided_are_not_in_the_loss(make: Make) -> None:
    bound = {"bound": [[0, 1], [2, 4]]}
    tree = InteractionTree.from_interactions(
        [
            make("a", prompt=[1], output=[2, 3, 4, 5, 6], request=bound),
            make("b", "a", prompt=[7], output=[8]),
            make("c", "a", prompt=[7], output=[9], request=bound, untrainable_reason="grammar"),
        ]
    )
    rewards = dict.fromkeys("abc", 1.0)
    masks = {id: row["loss_mask"].tolist() for id, row in individual_rows(tree, rewards).items()}
    assert masks["a"] == [0, 0, 1, 0, 0, 1]
    assert masks["b"] == [0, 0, 0, 0, 0, 0, 0, 1]
    assert not any(masks["c"])
    whole = concat_rows(tree, rewards)["b"]
    assert whole["loss_mask"].tolist() == [0, 0, 1, 0, 0, 1, 0, 1]
    assert (whole["logprobs"] != 0).sum() == 6, "all are recorded"


def test_individual_rows_are_one_of_each_interaction(tree: InteractionTree) -> None:
    rewards = propagate_rewards(tree, final_reward=1.0)
    rows = individual_rows(tree, rewards)
    assert {id: int(row["loss_mask"].sum()) for id, row in rows.items()} == {
        "a": 2, "b.0": 0, "b.1": 1, "c": 0, "d": 2,
    }  # fmt: skip
    assert {id: float(row["rewards"]) for id, row in rows.items()} == pytest.approx(rewards)
    assert (rows["c"]["versions"] != -1).sum() == 1
    for id, row in rows.items():
        assert row["input_ids"].tolist() == [*tree.prompt_ids(id), *tree[id].output_ids]


def test_concat_rows_are_one_of_each_path(tree: InteractionTree) -> None:
    rows = concat_rows(tree, propagate_rewards(tree, final_reward=1.0))
    assert rows.keys() == {"c", "d"}
    c = rows["c"]
    assert c["input_ids"].tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    assert c["loss_mask"].tolist() == [0, 0, 1, 1, 0, 1, 0, 0]
    assert c["versions"].tolist() == [-1, -1, 7, 7, -1, 7, -1, 7]
    assert c["logprobs"].tolist() == [0, 0, -0.125, -0.25, 0, -0.125, 0, -0.125]


def test_concat_is_refused_where_a_path_is_not_exact(make: Make) -> None:
    tree = InteractionTree.from_interactions(
        [
            make("a"),
            make("b", continuation=Continuation.BRANCH, branch_reason="reasoning was cut"),
            make("c", "b"),
        ]
    )
    with fails_with(Unprocessable, "interaction b ", "reasoning", "individual"):
        concat_rows(tree, propagate_rewards(tree))
    assert len(individual_rows(tree, propagate_rewards(tree))) == 3


def test_each_style_has_its_rows_and_another_is_refused(tree: InteractionTree) -> None:
    rewards = propagate_rewards(tree)
    assert export_rows(tree, rewards, "individual").keys() == {n.id for n in tree}
    assert export_rows(tree, rewards, "concat").keys() == {"c", "d"}
    with fails_with(InvalidRequest, "individual", "concat", param="style"):
        export_rows(tree, rewards, "other")
