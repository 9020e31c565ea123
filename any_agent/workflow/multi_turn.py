"""An item is tried again, in the same conversation, until the answer is right."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from any_agent import stats_tracker
from any_agent.engine import RolloutEngine
from any_agent.errors import ConfigError, ContextLengthExceeded
from any_agent.rewards.async_wrapper import AsyncRewardWrapper
from any_agent.types import GenerationHyperparameters, Message, ModelResponse
from any_agent.workflow import context as workflow_context
from any_agent.workflow.base import RolloutWorkflow
from any_agent.workflow.tensors import concat_padded_tensors
from any_agent.workflow.turn_sampler import (
    TokenRow,
    TurnSampler,
    checked_number,
    field_of,
    function_of,
    reward_fields,
)

if TYPE_CHECKING:
    import torch

FEEDBACK = (
    "That is not the right answer, or it could not be read. Go over the question and what you "
    "answered once more, find the mistake, and answer again."
)
"""What the model is told after a wrong answer."""


class MultiTurnWorkflow(RolloutWorkflow):
    """Up to ``max_turns`` answers to an item's ``messages``: after a wrong one, whose reward is not
    above 0, the model is told so and answers again.

    The episode's reward is the last answer's, times ``turn_discount`` for each answer before it,
    and belongs to all of them: they are one row of tokens, in which every turn's prompt begins
    with exactly the ids of the turn before and its answer. Where the chat template cannot go on
    exactly, a further row begins (``branches`` counts them). ``reward_fn``, ``gconfig`` and
    ``tokenizer`` are as :class:`RLVRWorkflow` takes them; ``feedback`` is what the model is told.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters | None,
        tokenizer: Any,
        max_turns: int,
        turn_discount: float,
        *,
        enable_thinking: bool | None = False,
        feedback: str = FEEDBACK,
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns is {max_turns}: there is one answer at least")
        if not 0 < turn_discount <= 1:
            raise ConfigError(f"turn_discount is {turn_discount}: it lies above 0, up to 1")
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.branches = 0
        """Turns that could not continue exactly."""
        self.async_reward_fn = AsyncRewardWrapper(function_of(reward_fn, "reward_fn"))
        self._feedback: Message = {"role": "user", "content": feedback}
        self._sampler = TurnSampler(tokenizer, gconfig, enable_thinking=enable_thinking)

    async def arun_episode(
        self, engine: RolloutEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """A batch of one row, [1, length], or of several where a turn branched."""
        sampler, rid = self._sampler, uuid.uuid4().hex
        messages: list[Message] = list(field_of(data, "messages", type(self).__name__))
        temperature = sampler.gconfig.temperature
        rows = [TokenRow(temperature)]
        ids = sampler.chat.render(messages, None)
        turns, reward = 0, 0.0
        while True:
            try:
                response = await sampler.sample(engine, ids, rid)
            except ContextLengthExceeded:
                if not turns:
                    raise
                # The answers before it are an episode, too.
                break
            turns += 1
            rows[-1].add(response)
            reward = await self._reward(response, data)
            if reward > 0 or turns == self.max_turns:
                break
            said = sampler.chat.parse(
                response.output_ids, prompt_ids=response.input_ids, tools=None
            ).to_message()
            following = sampler.chat.bridge(
                response.output_ids,
                [self._feedback],
                None,
                answer=said,
                prompt_tail=response.input_ids[-64:],
                past=messages,
            )
            messages += [said, self._feedback]
            if following is not None:
                ids = [*rows[-1].ids, *following]
            else:
                self.branches += 1
                rows.append(TokenRow(temperature))
                ids = sampler.chat.render(messages, None)
        reward *= self.turn_discount ** (turns - 1)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward, num_turns=turns)
        return concat_padded_tensors([row.tensors(reward) for row in rows if row.ids])

    async def _reward(self, response: ModelResponse, data: dict[str, Any]) -> float:
        returned = await self.async_reward_fn(
            self._sampler.chat.decode(response.input_ids),
            self._sampler.said(response),
            response.input_ids,
            response.output_ids,
            **reward_fields(data),
        )
        return checked_number(returned, "reward_fn")
