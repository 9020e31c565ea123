"""What ready workflows share: sampling one turn, and the row of tokens that turns make."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from any_agent.chat import ChatFormat, chat_format_for
from any_agent.completions.untrainable import has_modified_distribution
from any_agent.engine import RolloutEngine
from any_agent.errors import ConfigError, ContextLengthExceeded
from any_agent.types import GenerationHyperparameters, ModelRequest, ModelResponse
from any_agent.workflow import context as workflow_context

if TYPE_CHECKING:
    import torch


class TurnSampler:
    """Samples answers to token ids as a run or an evaluation wants them.

    ``tokenizer`` is as :func:`~any_agent.chat.chat_format_for` takes it. Without ``gconfig``
    answers are sampled as the run samples.
    """

    def __init__(
        self,
        tokenizer: Any,
        gconfig: GenerationHyperparameters | None,
        *,
        enable_thinking: bool | None,
    ) -> None:
        self.chat: ChatFormat = chat_format_for(tokenizer, enable_thinking=enable_thinking)
        self._gconfig = gconfig
        self._lengths: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    @property
    def gconfig(self) -> GenerationHyperparameters:
        """What this episode is sampled with.

        ConfigError for what could not be trained on, unless it is an evaluation that samples.
        """
        context = workflow_context.get()
        gconfig = self._gconfig or context.sampling
        if gconfig is None:
            raise ConfigError("outside of a run nobody says how to sample: give gconfig")
        stops = dict.fromkeys([*gconfig.stop_token_ids, *self.chat.stop_token_ids])
        gconfig = gconfig.new(stop_token_ids=tuple(stops))
        if context.is_eval:
            if context.temperature is None:
                return gconfig
            return gconfig.new(temperature=context.temperature)
        if why := has_modified_distribution(gconfig):
            raise ConfigError(
                f"what gconfig samples cannot be trained on ({why}): set a temperature above 0, "
                "and leave the other fields that bend the distribution alone; evaluations may "
                "sample as they like"
            )
        return gconfig

    async def sample(self, engine: RolloutEngine, ids: list[int], rid: str) -> ModelResponse:
        """The answer to a prompt, as long as the context has room.

        Raises ContextLengthExceeded if it has none, and as the engine's ``agenerate``.
        """
        gconfig = self.gconfig
        length = await self._context_length(engine)
        if length is not None:
            room = length - len(ids)
            if room < 1:
                raise ContextLengthExceeded(
                    f"the prompt has {len(ids)} tokens, and the engine's context {length}: "
                    "nothing is left for an answer"
                )
            gconfig = gconfig.new(max_new_tokens=min(gconfig.max_new_tokens, room))
        request = ModelRequest(rid=rid, input_ids=ids, gconfig=gconfig)
        return await engine.agenerate(request)

    async def _context_length(self, engine: RolloutEngine) -> int | None:
        asks = getattr(engine, "context_length", None)
        if asks is None:
            return None
        if engine not in self._lengths:
            self._lengths[engine] = int(await asks())
        return self._lengths[engine]

    def said(self, response: ModelResponse) -> str:
        """An answer's text, without the token that ends it."""
        ids = response.output_ids
        ended = ids and ids[-1] in self.chat.stop_token_ids
        return self.chat.decode(ids[:-1] if ended else ids)


class TokenRow:
    """The tokens of a conversation, each turn's prompt beginning with all that is in it before."""

    def __init__(self, temperature: float) -> None:
        self.ids: list[int] = []
        self._temperature = temperature
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    def add(self, response: ModelResponse) -> None:
        """A turn whose prompt goes on from what is here."""
        new = response.input_ids[len(self.ids) :]
        assert response.input_ids[: len(self.ids)] == self.ids, "the prompt does not go on exactly"
        self.ids += [*new, *response.output_ids]
        self._mask += [0] * len(new) + [1] * len(response.output_ids)
        self._logprobs += [0.0] * len(new) + response.output_logprobs
        self._versions += [-1] * len(new) + response.output_versions

    def tensors(self, reward: float) -> dict[str, torch.Tensor]:
        """As a batch of one, [1, length], with its reward and its temperature, [1]."""
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
    """A function, or the one of a dotted name; ConfigError naming the setting."""
    if isinstance(given, str):
        module, _, name = given.rpartition(".")
        try:
            given = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{setting} is {given!r}, which cannot be imported: {error}; write module.function"
            ) from error
    if not callable(given):
        raise ConfigError(f"{setting} is {given!r}: give a function, or its dotted name")
    return given


def field_of(data: dict[str, Any], name: str, workflow: str) -> Any:
    """A field of the dataset's item; ConfigError naming those that there are."""
    try:
        return data[name]
    except (KeyError, TypeError):
        there = ", ".join(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise ConfigError(
            f"{workflow} needs the field {name!r} of each item of the dataset; this one has {there}"
        ) from None


REWARD_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")
"""What a reward function is given before the item's fields, which do not replace them."""


def reward_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The item's fields as a reward function is given them, by keyword."""
    return {str(k): v for k, v in data.items() if k not in REWARD_ARGUMENTS}


def checked_number(reward: Any, name: str) -> float:
    """A reward function's number; ConfigError for what is none."""
    try:
        if isinstance(reward, str | bytes):
            raise TypeError
        return float(reward)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"{name} returned {reward!r} ({type(reward).__name__}): a reward must be a number"
        ) from None
