from __future__ import annotations

import numpy as np
import pytest
import torch

from any_agent.errors import InvalidTrajectory
from any_agent.record import (
    InteractionTree,
    InteractionWithTokenLogpReward,
    propagate_rewards,
)
from tests.workflow.tensors_lab import interaction


def made(style: str = "individual") -> dict[str, InteractionWithTokenLogpReward]:
    root = interaction("a", [1, 2], [3, 4])
    child = interaction("b", [5], [6], parent="a", reward=1.0)
    child.finish_reason = "length"
    tree = InteractionTree.from_interactions([root, child])
    rewards = propagate_rewards(tree, discount=0.5)
    return InteractionWithTokenLogpReward.of_tree(tree, rewards, style)


def test_it_knows_what_was_said() -> None:
    child = made()["b"]
    assert child.interaction_id == "b"
    assert [m["content"] for m in child.messages] == ["to a", "from a", "to b"]
    assert child.output_message_list == [{"role": "assistant", "content": "from b"}]
    assert child.temperature == 0.7


def test_its_response_is_the_engines() -> None:
    response = made()["b"].model_response
    assert response is not None
    assert response.input_tokens == [1, 2, 3, 4, 5]
    assert response.output_tokens == [6]
    assert response.output_logprobs == [-0.5]
    assert response.output_versions == [3]
    assert response.stop_reason == "length"
    assert made()["a"].model_response.stop_reason == "stop"  # type: ignore[union-attr]


def test_its_parent_is_the_turn_that_it_goes_on_from() -> None:
    child = made()["b"]
    parent = child.parent
    assert parent is not None and parent is child.parent
    assert (parent.interaction_id, parent.reward, child.reward) == ("a", 0.5, 1.0)
    assert parent.parent is None
    assert parent.row["input_ids"].tolist() == [1, 2, 3, 4]
    (leaf,) = made("concat").values()
    assert leaf.parent is not None
    assert leaf.parent.interaction_id == "a"


def test_its_tensors() -> None:
    tensors = made()["b"].to_tensor_dict()
    assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == {
        "input_ids": (torch.int32, (6,)),
        "loss_mask": (torch.int32, (6,)),
        "logprobs": (torch.float32, (6,)),
        "versions": (torch.int32, (6,)),
        "attention_mask": (torch.bool, (6,)),
        "rewards": (torch.float32, ()),
    }
    assert tensors["rewards"].item() == 1.0
    assert tensors["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("batched", [False, True])
def test_it_can_be_made_from_tensors_alone(batched: bool) -> None:
    whole = made()["b"]
    tensors = whole.to_tensor_dict()
    if batched:
        tensors = {name: tensor[None] for name, tensor in tensors.items()}
    again = InteractionWithTokenLogpReward.from_tensors("b", tensors)
    assert again.reward == 1.0
    assert again.has_tensor_data
    assert all(np.array_equal(again.row[name], whole.row[name]) for name in whole.row)
    assert all(again.row[name].dtype == whole.row[name].dtype for name in whole.row)
    assert (again.messages, again.output_message_list) == ([], None)
    assert (again.parent, again.model_response, again.temperature) == (None, None, None)


def test_a_field_that_is_not_there_is_named() -> None:
    tensors = made()["b"].to_tensor_dict()
    del tensors["versions"]
    with pytest.raises(InvalidTrajectory, match="interaction b has no versions"):
        InteractionWithTokenLogpReward.from_tensors("b", tensors)


def test_the_record_is_not_changed_through_it() -> None:
    tree = InteractionTree.from_interactions([interaction("a", [1], [2])])
    out = InteractionWithTokenLogpReward.of_tree(tree, {"a": 1.0}, "individual")["a"]
    assert out.interaction is not None
    out.interaction.reward = 5.0
    assert tree["a"].reward is None
