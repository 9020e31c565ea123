"""Trajectories as AReaL's clients take them: tensors in base64, little-endian."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel
from starlette.responses import Response

from any_agent.record import InteractionTree, export_rows, propagate_rewards
from any_agent.types import Trajectory
from proxy_ext.wire.http import JSONResponse


class ArealTensor(BaseModel):
    type: Literal["tensor"]
    data: str
    """Base64 of the values, little-endian, row by row."""
    shape: list[int]
    """[1, tokens]; of `rewards` [1]."""
    dtype: str
    """`torch.int32`, `torch.float32` or `torch.bool`."""


class ArealInteraction(BaseModel):
    tensor_dict: dict[str, ArealTensor]
    """`input_ids`, `loss_mask`, `logprobs`, `versions`, `attention_mask`, `rewards`."""
    reward: float
    """With what later turns gave back to it."""
    interaction_id: str


class ArealTrajectories(BaseModel):
    interactions: dict[str, ArealInteraction]


def exported(trajectories: list[Trajectory], discount: float, style: str) -> Response:
    """The answer; Unprocessable where a path is not token-exact and ``style`` is concat."""
    interactions: dict[str, Any] = {}
    for t in trajectories:
        rewards = propagate_rewards(t.interactions, discount=discount, final_reward=t.final_reward)
        tree = InteractionTree.from_interactions(t.interactions)
        for id, row in export_rows(tree, rewards, style).items():
            tensors = {name: _tensor(values) for name, values in row.items()}
            reward = float(row["rewards"])
            interactions[id] = {"tensor_dict": tensors, "reward": reward, "interaction_id": id}
    return JSONResponse({"interactions": interactions})


def _tensor(values: npt.NDArray[Any]) -> dict[str, Any]:
    """One row as a batch of one."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return {
        "type": "tensor",
        "data": base64.b64encode(little.tobytes()).decode(),
        "shape": [1, *values.shape],
        "dtype": f"torch.{values.dtype.name}",
    }
