"""Recorded model calls as workflows and exports use them: messages, tokens and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from any_agent.custom_calls import with_inputs
from any_agent.errors import InvalidTrajectory
from any_agent.record.content_removal import lacks_texts
from any_agent.record.export import export_rows, interaction_row, to_tensors
from any_agent.record.interaction_tree import InteractionTree
from any_agent.types import Interaction, Message, ModelResponse, Row, StopReason

if TYPE_CHECKING:
    import torch
    from openai.types.chat import ChatCompletion


_ENDINGS = ("stop", "length", "tool_calls", "content_filter", "function_call")


@dataclass(eq=False)
class CompletionWithTokenLogpReward:
    """The output of one model call.

    An :class:`InteractionWithTokenLogpReward` also has its prompt and its parent.
    """

    id: str
    text: str
    token_ids: list[int]
    """Token ids of the output, shape [output length]."""
    logprobs: list[float]
    """Log-probabilities of these tokens in nats, shape [output length]."""
    reward: float | None = None
    """The call's own reward, before rewards are propagated through the session."""
    versions: list[int] = field(default_factory=list)
    """The version that sampled each token, shape [output length]; empty if unknown."""
    messages: list[Message] = field(default_factory=list)
    """Messages of the request; empty if unknown."""

    @classmethod
    def of(cls, interaction: Interaction, messages: Sequence[Message] = ()) -> Self:
        """Return the output of a recorded call; ``messages`` are all those of its request."""
        return cls(
            interaction.id,
            str(interaction.output_message.get("content") or ""),
            interaction.output_ids.tolist(),
            interaction.output_logprobs.tolist(),
            interaction.reward,
            interaction.output_versions.tolist(),
            list(messages),
        )


def chat_completion_of(interaction: Interaction, prompt_tokens: int) -> dict[str, Any] | None:
    """Return a recorded call as OpenAI's chat completion; None if its texts were not kept.

    Its one choice has the index 0. An aborted answer gets the finish reason ``length``; a reason
    that OpenAI does not know becomes ``stop``.
    """
    if lacks_texts(interaction):
        return None
    output = len(interaction.output_ids)
    answer = with_inputs(interaction.output_message)
    message = {"content": None, "refusal": None, **answer, "role": "assistant"}
    reason = interaction.finish_reason
    if reason not in _ENDINGS:
        reason = "length" if reason == "abort" else "stop"
    return {
        "id": interaction.id,
        "object": "chat.completion",
        "created": int(interaction.created_at),
        "model": interaction.model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output,
            "total_tokens": prompt_tokens + output,
        },
    }


_DTYPES: Mapping[str, Any] = {
    "input_ids": np.int32,
    "loss_mask": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "attention_mask": np.bool_,
    "rewards": np.float32,
}


class InteractionWithTokenLogpReward:
    """An interaction with its token ids, log-probabilities and reward.

    Exports make them (:meth:`of_tree`, :meth:`from_tensors`); a workflow that samples itself makes
    one from an engine's response. In the style ``concat`` it is the leaf of a path, and its row
    covers the whole path. Unknown fields are None or empty.
    """

    def __init__(
        self,
        model_response: ModelResponse | None = None,
        reward: float | None = None,
        parent: InteractionWithTokenLogpReward | None = None,
        messages: list[Message] | None = None,
        output_message_list: list[Message] | None = None,
        completion: ChatCompletion | None = None,
        *,
        interaction_id: str | None = None,
        row: Row | None = None,
        interaction: Interaction | None = None,
        tree: InteractionTree | None = None,
        rewards: Mapping[str, float] | None = None,
        parent_id: str | None = None,
        role: str = "",
    ) -> None:
        """Without ``row``, the tensors' values come from ``model_response``.

        ``interaction``, ``tree`` and ``rewards`` (propagated, by id) are the record from which
        missing fields are read.
        """
        if interaction_id is None:
            interaction_id = completion.id if completion is not None else ""
        self.interaction_id = interaction_id
        self.reward = reward
        """The propagated reward: its own, plus that of its children; None counts as 0."""
        self.interaction = interaction
        self.tree = tree
        self.rewards = rewards or {}
        self.role = role if interaction is None else interaction.role
        """The agent of the session that made the call; "" for one without a name."""
        self.parent_id = parent_id if interaction is None else interaction.parent_id
        """The id of the interaction that it continues."""
        given = {
            "model_response": model_response,
            "parent": parent,
            "messages": messages,
            "output_message_list": output_message_list,
            "completion": completion,
            "row": row,
        }
        # Given values take the places of the cached properties below.
        self.__dict__.update({k: value for k, value in given.items() if value is not None})

    @classmethod
    def of_tree(
        cls, tree: InteractionTree, rewards: Mapping[str, float], style: str
    ) -> dict[str, Self]:
        """Export a session, by id; raises as :func:`any_agent.record.export_rows`."""
        return {
            id: cls._recorded(tree, rewards, id, row)
            for id, row in export_rows(tree, rewards, style).items()
        }

    @classmethod
    def _recorded(
        cls, tree: InteractionTree, rewards: Mapping[str, float], id: str, row: Row
    ) -> Self:
        return cls(
            interaction_id=id,
            reward=rewards[id],
            row=row,
            interaction=replace(tree[id]),
            tree=tree,
            rewards=rewards,
        )

    @classmethod
    def from_tensors(
        cls,
        interaction_id: str,
        tensors: Mapping[str, Any],
        *,
        messages: list[Message] | None = None,
        output_message_list: list[Message] | None = None,
        completion: ChatCompletion | Mapping[str, Any] | None = None,
        model_response: ModelResponse | Mapping[str, Any] | None = None,
        parent_id: str | None = None,
        role: str = "",
    ) -> Self:
        """Return an interaction from exported tensors or arrays, [seq_len] or [1, seq_len].

        The other fields may have their JSON form; :meth:`link` finds parents by ``parent_id``.
        Raises InvalidTrajectory for a missing field.
        """
        row: Row = {}
        for name, dtype in _DTYPES.items():
            if name not in tensors:
                raise InvalidTrajectory(f"interaction {interaction_id} has no {name}", param=name)
            values = np.asarray(tensors[name], dtype=dtype)
            row[name] = values.reshape(() if name == "rewards" else -1)
        return cls(
            interaction_id=interaction_id,
            reward=float(row["rewards"]),
            row=row,
            messages=messages,
            output_message_list=output_message_list,
            completion=_as_completion(completion),
            model_response=_as_response(interaction_id, model_response),
            parent_id=parent_id,
            role=role,
        )

    @staticmethod
    def link(
        interactions: dict[str, InteractionWithTokenLogpReward],
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """Return the dictionary with each ``parent`` set to the interaction that it continues."""
        for one in interactions.values():
            if one.parent is None and one.parent_id in interactions:
                one.parent = interactions[one.parent_id]
        return interactions

    @cached_property
    def row(self) -> Row:
        """The tensors' values as numpy arrays, unshifted, shapes [seq_len], ``rewards`` [].

        Raises InvalidTrajectory without a response, or if its lengths differ.
        """
        response = self.model_response
        if response is None:
            raise InvalidTrajectory(
                f"interaction {self.interaction_id!r} has no tensors: give it a model_response"
            )
        return _row_of(response, self.reward)

    @property
    def has_tensor_data(self) -> bool:
        return "row" in self.__dict__ or self.model_response is not None

    @cached_property
    def messages(self) -> list[Message]:
        """The messages of the request."""
        return [] if self.tree is None else self.tree.messages(self.interaction_id)

    @cached_property
    def output_message_list(self) -> list[Message] | None:
        """The answer, as a list of one message."""
        return None if self.interaction is None else [self.interaction.output_message]

    @cached_property
    def completion(self) -> ChatCompletion | None:
        """The answer as OpenAI's client returns it; None also without the package ``openai``."""
        if self.interaction is None or self.tree is None:
            return None
        prompt = len(self.tree.prompt_ids(self.interaction.id))
        return _as_completion(chat_completion_of(self.interaction, prompt))

    @cached_property
    def parent(self) -> InteractionWithTokenLogpReward | None:
        """The interaction that it continues; None for a root."""
        if self.interaction is None or self.tree is None or self.interaction.parent_id is None:
            return None
        id = self.interaction.parent_id
        row = interaction_row(self.tree, id, self.rewards[id])
        return self._recorded(self.tree, self.rewards, id, row)

    @cached_property
    def model_response(self) -> ModelResponse | None:
        """The prompt and the answer as an engine returns them."""
        node = self.interaction
        if node is None or self.tree is None:
            return None
        return ModelResponse(
            self.tree.prompt_ids(node.id).tolist(),
            node.output_ids.tolist(),
            node.output_logprobs.tolist(),
            node.output_versions.tolist(),
            _stop_reason(node.finish_reason),
        )

    @property
    def trained_role(self) -> str:
        """The role by which its row is compared: of a row with outputs of several, all of these,
        as `coder+planner`."""
        if self.interaction is None or self.tree is None:
            return self.role
        mask = self.row["loss_mask"]
        outputs = _outputs(self.tree.path(self.interaction.id))
        roles = {node.role for node, place in outputs if mask[place].any()}
        return "+".join(sorted(roles)) if len(roles) > 1 else self.role

    @property
    def cut_tokens(self) -> npt.NDArray[np.bool_] | None:
        """True on the tokens of each output that the limit of tokens cut off, [length of the row];
        None if its end is not known. Without a record only that of the last output is."""
        marks = np.zeros(len(self.row["input_ids"]), np.bool_)
        if self.interaction is None or self.tree is None:
            response = self.model_response
            if response is None:
                return None
            if self.row["loss_mask"][: response.input_len].any():
                # It trains earlier outputs, too, whose ends are not known.
                return None
            marks[response.input_len :] = response.stop_reason == "length"
            return marks
        for node, place in _outputs(self.tree.path(self.interaction.id)):
            marks[place] = node.cut
        return marks

    @property
    def temperature(self) -> float | None:
        """The sampling temperature of its tokens, if its record is known."""
        return None if self.interaction is None else self.interaction.gconfig.temperature

    def rewarded_row(self) -> Row:
        """Return the row with the current :attr:`reward`, which may have changed since."""
        return self.row | {"rewards": np.asarray(self.reward or 0.0, np.float32)}

    def to_tensor_dict(self) -> dict[str, torch.Tensor]:
        """Return the row with the current reward as torch tensors, [seq_len], ``rewards`` [1]."""
        tensors = to_tensors(self.rewarded_row())
        return tensors | {"rewards": tensors["rewards"].reshape(1)}


def _stop_reason(finish_reason: str) -> StopReason:
    if finish_reason in ("length", "abort"):
        return "length" if finish_reason == "length" else "abort"
    return "stop"


def _row_of(response: ModelResponse, reward: float | None) -> Row:
    before, sampled = response.input_len, response.output_len
    if not sampled == len(response.output_logprobs) == len(response.output_versions):
        raise InvalidTrajectory("a model_response needs one logprob and one version per token")
    prompt = np.zeros(before, np.int32)
    return {
        "input_ids": np.asarray([*response.input_ids, *response.output_ids], np.int32),
        "loss_mask": np.concatenate([prompt, np.ones(sampled, np.int32)]),
        "logprobs": np.asarray([*prompt, *response.output_logprobs], np.float32),
        "versions": np.asarray([*(prompt - 1), *response.output_versions], np.int32),
        "attention_mask": np.ones(before + sampled, np.bool_),
        "rewards": np.asarray(reward or 0.0, np.float32),
    }


def _as_completion(value: ChatCompletion | Mapping[str, Any] | None) -> ChatCompletion | None:
    if not isinstance(value, Mapping):
        return value
    try:
        from openai.types.chat import ChatCompletion
    except ModuleNotFoundError:
        return None
    return ChatCompletion.model_validate(value)


def _as_response(
    interaction_id: str, value: ModelResponse | Mapping[str, Any] | None
) -> ModelResponse | None:
    if not isinstance(value, Mapping):
        return value
    try:
        return ModelResponse(
            list(value["input_tokens"]),
            list(value["output_tokens"]),
            list(value["output_logprobs"]),
            list(value["output_versions"]),
            value["stop_reason"],
        )
    except KeyError as missing:
        raise InvalidTrajectory(
            f"interaction {interaction_id}: its model_response has no {missing.args[0]}",
            param="model_response",
        ) from None


def _outputs(path: Iterable[Interaction]) -> Iterator[tuple[Interaction, slice]]:
    """Yield each interaction of a path from the root, with the place of its output in the row."""
    at = 0
    for node in path:
        begin = at + len(node.prompt_delta_ids)
        at = begin + len(node.output_ids)
        yield node, slice(begin, at)
