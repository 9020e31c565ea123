"""`MultiTurnWorkflow`: repeated answers to an item in one conversation, until one is right."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from any_agent import stats_tracker
from any_agent.engine import RolloutEngine
from any_agent.errors import ConfigError, ContextLengthExceeded
from any_agent.types import GenerationHyperparameters, Message
from any_agent.workflow import context as workflow_context
from any_agent.workflow.rewarded import RewardedWorkflow, TokenRow
from any_agent.workflow.tensors import concat_padded_tensors

if TYPE_CHECKING:
    import torch

FEEDBACK = (
    "That is not the right answer, or it could not be read. Go over the question and what you "
    "answered once more, find the mistake, and answer again."
)
"""The user message after a wrong answer."""


class MultiTurnWorkflow(RewardedWorkflow):
    """Samples up to ``max_turns`` answers to an item's ``messages``: after a wrong one, whose
    reward is not above 0, the model gets the message ``feedback`` and answers again.

    The episode's reward is the last answer's, times ``turn_discount`` for each answer before it.
    All answers share it: they are one row of tokens, in which each turn's prompt begins with
    exactly the ids of the previous prompt and its answer. Where the chat template cannot continue
    exactly, a further row begins (``branches`` counts them). ``reward_fn``, ``gconfig`` and
    ``tokenizer`` are those of :class:`RLVRWorkflow`.
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
            raise ConfigError(f"max_turns is {max_turns}: it must be at least 1")
        if not 0 < turn_discount <= 1:
            raise ConfigError(f"turn_discount is {turn_discount}: it must be above 0 and at most 1")
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking)
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.branches = 0
        """The number of turns that could not continue exactly."""
        self._feedback: Message = {"role": "user", "content": feedback}

    async def arun_episode(
        self, engine: RolloutEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return a batch of one row, [1, length], or of several where a turn branched."""
        chat, rid = self._chat, uuid.uuid4().hex
        messages: list[Message] = list(self._messages(data))
        temperature = self._gconfig.temperature
        rows = [TokenRow(temperature)]
        ids = chat.render(messages, None)
        turns, reward = 0, 0.0
        while True:
            try:
                response = await self._sample(engine, ids, rid)
            except ContextLengthExceeded:
                if not turns:
                    raise
                # The previous answers are a complete episode.
                break
            turns += 1
            rows[-1].add(response)
            reward = await self._reward(response, data)
            if reward > 0 or turns == self.max_turns:
                break
            answer = chat.parse(
                response.output_ids, prompt_ids=response.input_ids, tools=None
            ).to_message()
            following = chat.bridge(
                response.output_ids,
                [self._feedback],
                None,
                answer=answer,
                prompt_tail=response.input_ids[-64:],
                past=messages,
            )
            messages += [answer, self._feedback]
            if following is not None:
                ids = [*rows[-1].ids, *following]
            else:
                self.branches += 1
                rows.append(TokenRow(temperature))
                ids = chat.render(messages, None)
        reward *= self.turn_discount ** (turns - 1)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward, num_turns=turns)
        return concat_padded_tensors([row.tensors(reward) for row in rows if row.ids])
