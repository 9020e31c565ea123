"""The built-in workflows, which sample answers and reward them by a function: `RLVRWorkflow` has
one answer to an item, `MultiTurnWorkflow` further ones until one is right."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from any_agent import stats_tracker
from any_agent.chat import ChatFormat, chat_format_for
from any_agent.completions.untrainable import has_modified_distribution
from any_agent.engine import RolloutEngine
from any_agent.errors import ConfigError, ContextLengthExceeded
from any_agent.rewards.async_wrapper import AsyncRewardWrapper
from any_agent.runtime.import_string import import_string
from any_agent.types import GenerationHyperparameters, Message, ModelRequest, ModelResponse
from any_agent.workflow import context as workflow_context
from any_agent.workflow.base import RolloutWorkflow
from any_agent.workflow.tensors import concat_padded_tensors

if TYPE_CHECKING:
    import torch

_REWARD_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")
"""The first arguments of a reward function; the item's fields do not replace them."""
FEEDBACK = (
    "That is not the right answer, or it could not be read. Go over the question and what you "
    "answered once more, find the mistake, and answer again."
)
"""The user message after a wrong answer."""


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
        self.async_reward_fn = AsyncRewardWrapper(_function(reward_fn, "reward_fn"))
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
            **{str(k): v for k, v in data.items() if k not in _REWARD_ARGUMENTS},
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
        self._ids_of = get_input_ids_fn and _function(get_input_ids_fn, "get_input_ids_fn")
        self._prompt_of = data_extract_prompt_fn and _function(
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


class TokenRow:
    """The tokens of a conversation, in which each turn's prompt continues the turns before it."""

    def __init__(self, temperature: float) -> None:
        self.ids: list[int] = []
        self._temperature = temperature
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._cut: list[bool] = []

    def add(self, response: ModelResponse) -> None:
        """Append a turn whose prompt continues this row."""
        new = response.input_ids[len(self.ids) :]
        assert response.input_ids[: len(self.ids)] == self.ids, "the prompt must continue the row"
        self.ids += [*new, *response.output_ids]
        self._mask += [0] * len(new) + [1] * len(response.output_ids)
        self._logprobs += [0.0] * len(new) + response.output_logprobs
        self._versions += [-1] * len(new) + response.output_versions
        cut = response.stop_reason == "length"
        self._cut += [False] * len(new) + [cut] * len(response.output_ids)

    def tensors(self, reward: float) -> dict[str, torch.Tensor]:
        """Return a batch of one row, [1, length], with its reward and its temperature, [1]."""
        import torch

        out = {
            "input_ids": torch.tensor([self.ids], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(self.ids), dtype=torch.bool),
            "loss_mask": torch.tensor([self._mask], dtype=torch.int32),
            "logprobs": torch.tensor([self._logprobs], dtype=torch.float32),
            "versions": torch.tensor([self._versions], dtype=torch.int32),
            "cut": torch.tensor([self._cut], dtype=torch.bool),
            "rewards": torch.tensor([reward], dtype=torch.float32),
        }
        if self._temperature > 0:
            out["temperatures"] = torch.tensor([self._temperature], dtype=torch.float32)
        return out


def _function(given: Callable[..., Any] | str, setting: str) -> Callable[..., Any]:
    """Return a function, or the function with a dotted name; ConfigError names the setting."""
    found = import_string(given, setting, kind="function") if isinstance(given, str) else given
    if not callable(found):
        raise ConfigError(f"{setting} is {found!r}: give a function, or its dotted name")
    return found
