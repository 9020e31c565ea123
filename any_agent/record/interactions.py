"""One recorded model call as workflows hand it on: its tokens, its reward, what was said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from any_agent.errors import InvalidTrajectory
from any_agent.record.export import export_rows, interaction_row, to_tensors
from any_agent.record.tree import InteractionTree
from any_agent.types import Interaction, Message, ModelResponse, Row, StopReason

if TYPE_CHECKING:
    import torch

_DTYPES: Mapping[str, Any] = {
    "input_ids": np.int32,
    "loss_mask": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "attention_mask": np.bool_,
    "rewards": np.float32,
}


@dataclass(eq=False)
class InteractionWithTokenLogpReward:
    """An interaction with its token ids, log-probabilities and reward.

    In the style ``concat`` it is a path's leaf, and its row is the whole path's. Where it came over
    HTTP as tensors only (:meth:`from_tensors`), nothing is known of what was said.
    """

    interaction_id: str
    reward: float
    """r: its own reward and what ran back from its children."""
    row: Row
    """Its tensors' values as numpy arrays, unshifted, shapes [seq_len]."""
    interaction: Interaction | None = None
    tree: InteractionTree | None = field(default=None, repr=False)
    rewards: Mapping[str, float] = field(default_factory=dict, repr=False)
    """r of every interaction of the tree, by id."""
    exported: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What a service told of it beside its tensors, where it came over HTTP."""

    @classmethod
    def of_tree(
        cls, tree: InteractionTree, rewards: Mapping[str, float], style: str
    ) -> dict[str, Self]:
        """What a session exports, by id; raises as :func:`any_agent.record.export_rows`."""
        return {
            id: cls(id, rewards[id], row, replace(tree[id]), tree, rewards)
            for id, row in export_rows(tree, rewards, style).items()
        }

    @classmethod
    def from_tensors(
        cls,
        interaction_id: str,
        tensors: Mapping[str, Any],
        *,
        messages: list[Message] | None = None,
        output_message_list: list[Message] | None = None,
        completion: Any = None,
        model_response: Any = None,
        parent_id: str | None = None,
    ) -> Self:
        """One that was exported as tensors or arrays, of the shape [seq_len] or [1, seq_len].

        Raises InvalidTrajectory where a field is missing.
        """
        row: Row = {}
        for name, dtype in _DTYPES.items():
            if name not in tensors:
                raise InvalidTrajectory(f"interaction {interaction_id} has no {name}", param=name)
            values = np.asarray(tensors[name], dtype=dtype)
            row[name] = values.reshape(() if name == "rewards" else -1)
        told = {
            "messages": messages,
            "output_message_list": output_message_list,
            "completion": completion,
            "model_response": model_response,
            "parent_id": parent_id,
        }
        return cls(interaction_id, float(row["rewards"]), row, exported=told)

    @staticmethod
    def link(
        interactions: dict[str, InteractionWithTokenLogpReward],
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """The same dictionary, each one's ``parent`` set to the one in it that it goes on from."""
        for one in interactions.values():
            one.__dict__["parent"] = interactions.get(one.exported.get("parent_id") or "")
        return interactions

    @property
    def messages(self) -> list[Message]:
        """The request's; empty where only tensors are known."""
        if self.tree is None:
            return self.exported.get("messages") or []
        return self.tree.messages(self.interaction_id)

    @property
    def output_message_list(self) -> list[Message] | None:
        """The answer, as a list of one message; None where only tensors are known."""
        if self.interaction is None:
            return self.exported.get("output_message_list")
        return [self.interaction.output_message]

    @property
    def completion(self) -> Any:
        """The answer as OpenAI's ChatCompletion; None where it is not known."""
        if (told := self.exported.get("completion")) is None:
            return None
        from openai.types.chat import ChatCompletion

        return ChatCompletion.model_validate(told)

    @property
    def has_tensor_data(self) -> bool:
        return bool(self.row)

    @cached_property
    def parent(self) -> InteractionWithTokenLogpReward | None:
        """The interaction that it goes on from; None for a root, or where it is not known."""
        if self.interaction is None or self.tree is None or self.interaction.parent_id is None:
            return None
        id = self.interaction.parent_id
        reward = self.rewards[id]
        row = interaction_row(self.tree, id, reward)
        return InteractionWithTokenLogpReward(
            id, reward, row, replace(self.tree[id]), self.tree, self.rewards
        )

    @property
    def model_response(self) -> ModelResponse | None:
        """Prompt and answer as an engine gives them; None where only tensors are known."""
        node = self.interaction
        if node is None or self.tree is None:
            told = self.exported.get("model_response")
            if told is None:
                return None
            tokens = told["input_tokens"], told["output_tokens"]
            rest = told["output_logprobs"], told["output_versions"], told["stop_reason"]
            return ModelResponse(*tokens, *rest)
        return ModelResponse(
            self.tree.prompt_ids(node.id).tolist(),
            node.output_ids.tolist(),
            node.output_logprobs.tolist(),
            node.output_versions.tolist(),
            _stop_reason(node.finish_reason),
        )

    @property
    def temperature(self) -> float | None:
        """What its tokens were sampled at; None where only tensors are known."""
        return None if self.interaction is None else self.interaction.gconfig.temperature

    def rewarded_row(self) -> Row:
        """The row with :attr:`reward` as it is now: whoever exported it may have changed that."""
        return self.row | {"rewards": np.asarray(self.reward, np.float32)}

    def to_tensor_dict(self) -> dict[str, torch.Tensor]:
        """The row, with the reward as it is now, as torch tensors of the same shapes and types."""
        return to_tensors(self.rewarded_row())


def _stop_reason(finish_reason: str) -> StopReason:
    if finish_reason in ("length", "abort"):
        return "length" if finish_reason == "length" else "abort"
    return "stop"
