"""Trajectories as AReaL's clients take them: tensors in base64, and what was said."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel
from starlette.responses import Response

from any_agent.record import (
    InteractionTree,
    InteractionWithTokenLogpReward,
    chat_completion_of,
    propagate_rewards,
)
from any_agent.record.content_removal import lacks_texts
from any_agent.types import Trajectory


class ArealTensor(BaseModel):
    type: Literal["tensor"]
    data: str
    """Base64 of the values, little-endian, row by row."""
    shape: list[int]
    """[1, tokens]; of `rewards` [1]."""
    dtype: str
    """`torch.int32`, `torch.float32` or `torch.bool`."""


class ArealModelResponse(BaseModel):
    """What the engine was given and gave: one log-probability and one version per output token."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: Literal["stop", "length", "abort"]


class ArealInteraction(BaseModel):
    tensor_dict: dict[str, ArealTensor]
    """`input_ids`, `loss_mask`, `logprobs`, `versions`, `attention_mask`, `rewards`."""
    reward: float
    """With what later turns gave back to it."""
    interaction_id: str
    parent_id: str | None
    """The interaction that it goes on from."""
    messages: list[dict[str, Any]]
    """The request's; none where the run keeps no texts (`sessions.store_content`)."""
    output_message_list: list[dict[str, Any]] | None
    """The answer, as a list of one message; null without texts."""
    completion: dict[str, Any] | None
    """The answer as OpenAI's ChatCompletion, whichever API it was asked by; null without texts."""
    model_response: ArealModelResponse


class ArealTrajectories(BaseModel):
    interactions: dict[str, ArealInteraction]


async def exported(trajectories: list[Trajectory], discount: float, style: str) -> Response:
    """The answer; Unprocessable where a path is not token-exact and ``style`` is concat."""
    interactions: dict[str, Any] = {}
    for t in trajectories:
        rewards = propagate_rewards(t.interactions, discount=discount, final_reward=t.final_reward)
        tree = InteractionTree.from_interactions(t.interactions)
        found = InteractionWithTokenLogpReward.of_tree(tree, rewards, style)
        interactions |= {id: _exported(one, tree) for id, one in found.items()}
    # Each interaction has its whole prompt: long sessions take a while.
    content = await asyncio.to_thread(orjson.dumps, {"interactions": interactions})
    return Response(content, media_type="application/json")


def _exported(one: InteractionWithTokenLogpReward, tree: InteractionTree) -> dict[str, Any]:
    node, response = tree[one.interaction_id], one.model_response
    assert response is not None
    told = not any(map(lacks_texts, tree.path(node.id)))
    return {
        "tensor_dict": {name: _tensor(values) for name, values in one.row.items()},
        "reward": float(one.row["rewards"]),
        "interaction_id": node.id,
        "parent_id": node.parent_id,
        "messages": one.messages if told else [],
        "output_message_list": one.output_message_list if told else None,
        "completion": chat_completion_of(node, len(response.input_tokens)) if told else None,
        "model_response": {
            "input_tokens": response.input_tokens,
            "output_tokens": response.output_tokens,
            "output_logprobs": response.output_logprobs,
            "output_versions": response.output_versions,
            "stop_reason": response.stop_reason,
        },
    }


def _tensor(values: npt.NDArray[Any]) -> dict[str, Any]:
    """One row as a batch of one."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return {
        "type": "tensor",
        "data": base64.b64encode(little.tobytes()).decode(),
        "shape": [1, *values.shape],
        "dtype": f"torch.{values.dtype.name}",
    }
