"""The stages of a call: its choices, their outputs while they are sampled, and their records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from any_agent.chat import ChatFormat, MessageDelta
from any_agent.completions.logprobs import TopLogprobs
from any_agent.completions.params.call import ChatCall
from any_agent.completions.prompt import Prompt
from any_agent.types import GenerationHyperparameters, Interaction, Message


def choice_ids(completion_id: str, count: int) -> list[str]:
    """Return the ids of a completion's interactions, in the order of its choices."""
    return [completion_id] if count == 1 else [f"{completion_id}.{k}" for k in range(count)]


def completion_of(interaction_id: str) -> str | None:
    """Return the completion of an interaction that is one of several choices; else None."""
    completion, _, choice = interaction_id.rpartition(".")
    return completion if completion and choice.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample of a request; each is an interaction of its own."""

    index: int
    id: str
    prompt: Prompt
    message_delta: list[Message]
    key: bytes
    """The chain key of the request's messages and tools, which the answer's key extends."""
    gconfig: GenerationHyperparameters
    """The choice's sampling, with a seed of its own if the call has one."""
    forced: tuple[int, ...] = ()
    """The ids at the prompt's end that open a forced call: they are parsed as output."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call whose prompt is rendered and fits: its request is valid in every part."""

    id: str
    call: ChatCall
    chat: ChatFormat
    """The chat format with the request's template arguments."""
    choices: tuple[Choice, ...]
    prompt_tokens: int
    """The tokens of the prompts, each counted once."""
    created_at: float


@dataclass(frozen=True, slots=True)
class Head:
    """The facts of an answer that are known before its first token."""

    id: str
    created_at: float
    gconfig: GenerationHyperparameters
    prompt_tokens: int
    choices: int = 1
    seeds: tuple[int | None, ...] = ()
    """The seeds of the choices."""

    @classmethod
    def of(cls, prepared: Prepared) -> Head:
        p = prepared
        seeds = tuple(choice.gconfig.seed for choice in p.choices)
        first = p.choices[0].gconfig
        return cls(p.id, p.created_at, first, p.prompt_tokens, len(p.choices), seeds)


@dataclass(slots=True)
class Delta:
    """Newly certain text of one choice, and the tokens sampled since its last delta."""

    message: MessageDelta
    output_ids: list[int]
    logprobs: list[float]
    top_logprobs: TopLogprobs | None = None
    index: int = 0
    calls: bool = False
    """True in a replay if the tokens of a tool call may be here, before the call itself."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one choice: the answer and its record."""

    choice: Choice
    interaction: Interaction
    key: bytes
    """The chain key under which a continuation finds the interaction."""


Completed = Delta | Completion


class RequestRecord(TypedDict, total=False):
    """``Interaction.request``: the facts of a request beside messages, tools and sampling.

    Where texts are not kept, only numbers, digests, the role and the adapter are.
    """

    overridden: dict[str, Any]
    """The agent's values that the run replaced, by the names of ``gconfig``, which has the values
    that were used."""
    recorded: dict[str, Any]
    """Parameters without effect, as they came; those with an effect on the prompt's ids alone:
    ``reasoning_effort``, ``chat_template_kwargs``, ``tool_choice``; and
    ``parallel_tool_calls: false``, which ends the answer after one call."""
    ignored: list[str]
    """The plain names of unknown parameters; values that may be kept are in ``recorded``."""
    forced: int
    """The number of ids at the prompt's end that open a forced call: they are parsed as output, but
    are no output ids."""
    top_logprobs: dict[str, str]
    """The likeliest tokens at each position, if requested: see ``PackedTopLogprobs``."""
    bound: list[list[int]]
    """The runs [start, end) of output tokens that a grammar decided, which are not trained on; the
    others were drawn as if there were none."""
    order: list[list[Any]]
    """The order of the answer's parts, unless it is reasoning, content, calls: see
    ``any_agent.completions.encoders.output_order``."""
    matched_stop: int
    """The index in ``gconfig.stop`` of the text that ended the answer."""
    found_tools: list[dict[str, Any]]
    """The deferred tools that the messages show, as functions of a chat call."""
    role: str
    """The agent of the session that made the call, as the header `x-any-agent-role` named it."""
    adapter: str
    """The adapter of `engine.adapters` that sampled the answer, as the engine names it:
    ``NAME@FINGERPRINT``, the digest of its files."""
    responses: dict[str, Any]
    """The fields of a `/v1/responses` request that its answer repeats; ``instructions``: the number
    of their lines, which are the first messages."""
    vetoed: bool
    """True if a guardrail's refusal of the answer vetoes the session."""
    mixed_cache: bool
    """True if several versions sampled tokens over one cache (`update_mode: in_place`)."""
    text: dict[str, Any]
    """The digests of a legacy completion, by which a prompt that continues it is recognised."""


def recorded_of(call: ChatCall) -> dict[str, Any]:
    """Return the ``recorded`` entry of a call's record."""
    recorded = dict(call.recorded)
    if call.template_kwargs:
        recorded["chat_template_kwargs"] = dict(call.template_kwargs)
    if call.forced_call is not None:
        recorded["tool_choice"] = call.forced_call or "required"
    if not call.parallel_tool_calls:
        recorded["parallel_tool_calls"] = False
    return recorded
