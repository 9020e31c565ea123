from __future__ import annotations

import numpy as np
import pytest
import torch

from any_agent.errors import InvalidTrajectory
from any_agent.record import (
    InteractionTree,
    InteractionWithTokenLogpReward,
    chat_completion_of,
    propagate_rewards,
    strip_content,
)
from any_agent.types import ModelResponse
from tests.support.errors import fails_with
from tests.support.workflow.tensors import interaction


def made(style: str = "individual") -> dict[str, InteractionWithTokenLogpReward]:
    root = interaction("a", [1, 2], [3, 4])
    child = interaction("b", [5], [6], parent="a", reward=1.0)
    child.finish_reason = "length"
    tree = InteractionTree.from_interactions([root, child])
    rewards = propagate_rewards(tree, discount=0.5)
    return InteractionWithTokenLogpReward.of_tree(tree, rewards, style)


def test_an_exported_interaction_has_all_that_is_known_of_its_call() -> None:
    exported = made()
    child = exported["b"]
    assert (child.interaction_id, child.temperature) == ("b", 0.7)
    assert [m["content"] for m in child.messages] == ["to a", "from a", "to b"]
    assert child.output_message_list == [{"role": "assistant", "content": "from b"}]
    assert child.model_response == ModelResponse([1, 2, 3, 4, 5], [6], [-0.5], [3], "length")
    parent = child.parent
    assert parent is not None and parent is child.parent
    assert (parent.interaction_id, parent.reward, child.reward) == ("a", 0.5, 1.0)
    assert parent.parent is None
    assert parent.row["input_ids"].tolist() == [1, 2, 3, 4]
    tensors = child.to_tensor_dict()
    assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == {
        "input_ids": (torch.int32, (6,)),
        "loss_mask": (torch.int32, (6,)),
        "logprobs": (torch.float32, (6,)),
        "versions": (torch.int32, (6,)),
        "attention_mask": (torch.bool, (6,)),
        "rewards": (torch.float32, (1,)),
    }
    assert tensors["rewards"].item() == 1.0
    assert tensors["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1]
    completion = child.completion
    assert completion is not None and completion.usage is not None
    (choice,) = completion.choices
    told = (completion.id, choice.message.content, choice.finish_reason)
    assert told == ("b", "from b", "length")
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 1)
    (leaf,) = made("concat").values()
    assert leaf.parent is not None and leaf.parent.interaction_id == "a"
    # The record is not changed through it.
    tree = InteractionTree.from_interactions([interaction("a", [1], [2])])
    out = InteractionWithTokenLogpReward.of_tree(tree, {"a": 1.0}, "individual")["a"]
    assert out.interaction is not None
    out.interaction.reward = 5.0
    assert tree["a"].reward is None


@pytest.mark.parametrize("batched", [False, True])
def test_an_exported_interaction_can_be_made_from_tensors_alone(batched: bool) -> None:
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
    assert again.completion is None


def test_an_interaction_made_from_tensors_keeps_the_response_beside_them() -> None:
    exported = made()
    response = {"input_tokens": [1, 2], "output_tokens": [3], "output_logprobs": [-0.5]}
    response |= {"output_versions": [3], "stop_reason": "stop"}
    again = {
        id: InteractionWithTokenLogpReward.from_tensors(
            id,
            one.to_tensor_dict(),
            messages=one.messages,
            output_message_list=one.output_message_list,
            completion=one.completion.model_dump() if one.completion else None,
            model_response=response,
            parent_id=one.parent_id,
        )
        for id, one in exported.items()
    }
    assert InteractionWithTokenLogpReward.link(again) is again
    assert (again["a"].parent, again["b"].parent) == (None, again["a"])
    assert again["b"].messages == exported["b"].messages
    assert again["b"].output_message_list == exported["b"].output_message_list
    assert again["b"].completion == exported["b"].completion
    made_of = again["b"].model_response
    assert made_of is not None and (made_of.input_tokens, made_of.output_tokens) == ([1, 2], [3])
    del response["output_versions"]
    with fails_with(InvalidTrajectory, "output_versions", param="model_response"):
        InteractionWithTokenLogpReward.from_tensors(
            "b", exported["b"].to_tensor_dict(), model_response=response
        )


def test_the_finish_reason_of_a_completion_is_one_of_openais() -> None:
    node = interaction("a", [1], [2])
    for reason, shown in (("abort", "length"), ("an engine's own", "stop")):
        node.finish_reason = reason
        said = chat_completion_of(node, 1)
        assert said is not None and said["choices"][0]["finish_reason"] == shown
    assert chat_completion_of(strip_content(node), 1) is None, "its texts are not kept"


def test_an_exported_interaction_can_be_made_by_hand() -> None:
    response = ModelResponse([1, 2], [3, 4], [-0.5, -0.25], [6, 7], "stop")
    question = [{"role": "user", "content": "?"}]
    answer = [{"role": "assistant", "content": "!"}]
    parent = InteractionWithTokenLogpReward(response, 0.0)
    one = InteractionWithTokenLogpReward(
        model_response=response,
        reward=0.5,
        parent=parent,
        messages=question,
        output_message_list=answer,
        completion=made()["a"].completion,
    )
    assert (one.interaction_id, one.parent, one.messages) == ("a", parent, question)
    assert one.output_message_list == answer
    one.reward = 1.5
    assert {name: t.tolist() for name, t in one.to_tensor_dict().items()} == {
        "input_ids": [1, 2, 3, 4],
        "loss_mask": [0, 0, 1, 1],
        "logprobs": [0.0, 0.0, -0.5, -0.25],
        "versions": [-1, -1, 6, 7],
        "attention_mask": [True] * 4,
        "rewards": [1.5],
    }
    assert [t.dtype for t in one.to_tensor_dict().values()] == [
        t.dtype for t in made()["a"].to_tensor_dict().values()
    ]


def test_what_has_no_tokens_has_no_tensors() -> None:
    empty = InteractionWithTokenLogpReward(reward=1.0)
    assert not empty.has_tensor_data
    short = InteractionWithTokenLogpReward(ModelResponse([1], [2, 3], [-0.5], [0, 0], "stop"))
    for one in (empty, short):
        with pytest.raises(InvalidTrajectory):
            one.to_tensor_dict()
    tensors = made()["b"].to_tensor_dict()
    del tensors["versions"]
    with fails_with(InvalidTrajectory, param="versions"):
        InteractionWithTokenLogpReward.from_tensors("b", tensors)
