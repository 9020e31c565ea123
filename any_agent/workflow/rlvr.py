"""`RLVRWorkflow`: one prompt, one answer, and one reward by a function that verifies it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from any_agent import stats_tracker
from any_agent.engine import RolloutEngine
from any_agent.types import GenerationHyperparameters
from any_agent.workflow import context as workflow_context
from any_agent.workflow.rewarded import RewardedWorkflow, TokenRow, function_of

if TYPE_CHECKING:
    import torch


class RLVRWorkflow(RewardedWorkflow):
    """Samples one answer to each item's ``messages`` and rewards it.

    ``reward_fn(prompt, completions, prompt_ids, completion_ids, **data)`` is a function at the top
    level of a module, or its dotted name; it runs in a process of a pool (AsyncRewardWrapper). Its
    ``completions`` is the answer's text without the token that ends it. With ``gconfig`` None the
    run's sampling parameters apply. ``tokenizer`` is a tokenizer of transformers or the path of
    one. ``data_extract_prompt_fn(data)`` returns the messages where they are not the item's
    ``messages``; ``get_input_ids_fn(prompt, tokenizer, enable_thinking)`` returns the prompt's
    token ids instead of the chat template."""

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters | None,
        tokenizer: Any,
        enable_thinking: bool | None = False,
        get_input_ids_fn: Callable[..., list[int]] | str | None = None,
        data_extract_prompt_fn: Callable[[dict[str, Any]], Any] | str | None = None,
    ) -> None:
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking)
        self.enable_thinking = enable_thinking
        self._ids_of = get_input_ids_fn and function_of(get_input_ids_fn, "get_input_ids_fn")
        self._prompt_of = data_extract_prompt_fn and function_of(
            data_extract_prompt_fn, "data_extract_prompt_fn"
        )

    async def arun_episode(
        self, engine: RolloutEngine, data: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return a batch of one row, [1, length]."""
        response = await self._sample(engine, self._input_ids(data), uuid.uuid4().hex)
        reward = await self._reward(response, data)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)
        row = TokenRow(self._gconfig.temperature)
        row.add(response)
        return row.tensors(reward)

    def _input_ids(self, data: dict[str, Any]) -> list[int]:
        extract = self._prompt_of
        prompt = extract(data) if extract else self._messages(data)
        chat = self._chat
        if self._ids_of:
            ids = self._ids_of(prompt, chat.tokenizer, self.enable_thinking)
            return [int(i) for i in ids]
        return chat.render(prompt, None)
