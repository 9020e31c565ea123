"""`RewardedWorkflow`: the base of the built-in workflows, and the row of tokens they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from any_agent.chat import ChatFormat, chat_format_for
from any_agent.completions.untrainable import has_modified_distribution
from any_agent.engine import RolloutEngine
from any_agent.errors import ConfigError, ContextLengthExceeded
from any_agent.rewards.async_wrapper import AsyncRewardWrapper
from any_agent.runtime.import_string import import_string
from any_agent.types import GenerationHyperparameters, ModelRequest, ModelResponse
from any_agent.workflow import context as workflow_context
from any_agent.workflow.base import RolloutWorkflow

if TYPE_CHECKING:
    import torch


class RewardedWorkflow(RolloutWorkflow):
    """A workflow that samples answers to token ids, and rewards them by a function of an answer
    and its item.

    ``tokenizer`` is an argument of :func:`~any_agent.chat.chat_format_for`. Without ``gconfig``
    the sampling parameters of the run apply.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters | None,
        tokenizer: Any,
        enable_thinking: bool | None,
    ) -> None:
        self.async_reward_fn = AsyncRewardWrapper(function_of(reward_fn, "reward_fn"))
        self._chat: ChatFormat = chat_format_for(tokenizer, enable_thinking=enable_thinking)
        self._given = gconfig
        self._lengths: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    @property
    def _gconfig(self) -> GenerationHyperparameters:
        """The sampling parameters of this episode.

        Raises ConfigError for parameters whose samples cannot be trained on, except in an
        evaluation.
        """
        context = workflow_context.get()
        gconfig = self._given or context.sampling
        if gconfig is None:
            raise ConfigError("outside of a run there are no sampling parameters: give gconfig")
        stops = dict.fromkeys([*gconfig.stop_token_ids, *self._chat.stop_token_ids])
        gconfig = gconfig.new(stop_token_ids=tuple(stops))
        if context.is_eval:
            if context.temperature is None:
                return gconfig
            return gconfig.new(temperature=context.temperature)
        if why := has_modified_distribution(gconfig):
            raise ConfigError(
                f"samples of this gconfig cannot be trained on ({why}): set a temperature above 0, "
                "and no other field that changes the distribution; evaluations may use any"
            )
        return gconfig

    async def _sample(self, engine: RolloutEngine, ids: list[int], rid: str) -> ModelResponse:
        """Return the answer to a prompt, limited to the context's room.

        Raises ContextLengthExceeded without any room, and the errors of the engine's ``agenerate``.
        """
        gconfig = self._gconfig
        length = await self._context_length(engine)
        if length is not None:
            room = length - len(ids)
            if room < 1:
                raise ContextLengthExceeded(
                    f"the prompt has {len(ids)} tokens, and the engine's context {length}: no "
                    "token is left for an answer"
                )
            gconfig = gconfig.new(max_new_tokens=min(gconfig.max_new_tokens, room))
        request = ModelRequest(rid=rid, input_ids=ids, gconfig=gconfig)
        return await engine.agenerate(request)

    async def _context_length(self, engine: RolloutEngine) -> int | None:
        read = getattr(engine, "context_length", None)
        if read is None:
            return None
        if engine not in self._lengths:
            self._lengths[engine] = int(await read())
        return self._lengths[engine]

    def _messages(self, data: dict[str, Any]) -> Any:
        """Return an item's messages; ConfigError lists the item's fields."""
        try:
            return data["messages"]
        except (KeyError, TypeError):
            there = ", ".join(map(str, data)) if isinstance(data, dict) else type(data).__name__
            raise ConfigError(
                f"{type(self).__name__} needs the field 'messages' of each item of the dataset; "
                f"this one has {there}"
            ) from None

    async def _reward(self, response: ModelResponse, data: dict[str, Any]) -> float:
        chat, ids = self._chat, response.output_ids
        ended = ids and ids[-1] in chat.stop_token_ids
        reward = await self.async_reward_fn(
            chat.decode(response.input_ids),
            # The answer's text is without the token that ends it.
            chat.decode(ids[:-1] if ended else ids),
            response.input_ids,
            ids,
            **{str(k): v for k, v in data.items() if k not in REWARD_ARGUMENTS},
        )
        try:
            if isinstance(reward, str | bytes):
                raise TypeError
            return float(reward)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigError(
                f"reward_fn returned {reward!r} ({type(reward).__name__}): a reward must be a "
                "number"
            ) from None


class TokenRow:
    """The tokens of a conversation, in which each turn's prompt continues the turns before it."""

    def __init__(self, temperature: float) -> None:
        self.ids: list[int] = []
        self._temperature = temperature
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    def add(self, response: ModelResponse) -> None:
        """Append a turn whose prompt continues this row."""
        new = response.input_ids[len(self.ids) :]
        assert response.input_ids[: len(self.ids)] == self.ids, "the prompt must continue the row"
        self.ids += [*new, *response.output_ids]
        self._mask += [0] * len(new) + [1] * len(response.output_ids)
        self._logprobs += [0.0] * len(new) + response.output_logprobs
        self._versions += [-1] * len(new) + response.output_versions

    def tensors(self, reward: float) -> dict[str, torch.Tensor]:
        """Return a batch of one row, [1, length], with its reward and its temperature, [1]."""
        import torch

        out = {
            "input_ids": torch.tensor([self.ids], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(self.ids), dtype=torch.bool),
            "loss_mask": torch.tensor([self._mask], dtype=torch.int32),
            "logprobs": torch.tensor([self._logprobs], dtype=torch.float32),
            "versions": torch.tensor([self._versions], dtype=torch.int32),
            "rewards": torch.tensor([reward], dtype=torch.float32),
        }
        if self._temperature > 0:
            out["temperatures"] = torch.tensor([self._temperature], dtype=torch.float32)
        return out


def function_of(given: Callable[..., Any] | str, setting: str) -> Callable[..., Any]:
    """Return a function, or the function with a dotted name; ConfigError names the setting."""
    found = import_string(given, setting) if isinstance(given, str) else given
    if not callable(found):
        raise ConfigError(f"{setting} is {given!r}: give a function, or its dotted name")
    return found


REWARD_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")
"""The first arguments of a reward function; the item's fields do not replace them."""
