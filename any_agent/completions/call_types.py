"""What a request becomes: its choices, what they yield while they are sampled, and their ends."""

from __future__ import annotations

from dataclasses import dataclass

from any_agent.chat import ChatFormat, MessageDelta, ParsedMessage
from any_agent.completions.params.call import ChatCall
from any_agent.completions.prompt import Prompt
from any_agent.completions.top_logprobs import TopLogprobs
from any_agent.types import GenerationHyperparameters, Interaction, Message


def choice_ids(completion_id: str, count: int) -> list[str]:
    """The interactions of a completion, in the order of its choices."""
    return [completion_id] if count == 1 else [f"{completion_id}.{k}" for k in range(count)]


def completion_of(interaction_id: str) -> str | None:
    """The completion of which an interaction is one of several choices; None of a single one."""
    completion, _, choice = interaction_id.rpartition(".")
    return completion if completion and choice.isdecimal() else None


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample that a request asks for; each is an interaction of its own."""

    index: int
    id: str
    prompt: Prompt
    message_delta: list[Message]
    key: bytes
    """Chain key over the request's messages and tools, from which its answer's goes on."""
    gconfig: GenerationHyperparameters
    """With a seed of its own, if there are seeds."""
    forced: tuple[int, ...] = ()
    """Ids at the prompt's end that open a call: they are read as output."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call whose prompt is rendered and fits: nothing about the request can fail any more."""

    id: str
    call: ChatCall
    chat: ChatFormat
    """As the request's template arguments make it."""
    gconfig: GenerationHyperparameters
    choices: tuple[Choice, ...]
    prompt_tokens: int
    """Of its prompts, each counted once."""
    created_at: float


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of an answer before its first token."""

    id: str
    created_at: float
    gconfig: GenerationHyperparameters
    prompt_tokens: int
    choices: int = 1
    seeds: tuple[int | None, ...] = ()
    """Those that its choices are sampled with."""

    @classmethod
    def of(cls, prepared: Prepared) -> Head:
        p = prepared
        seeds = tuple(choice.gconfig.seed for choice in p.choices)
        return cls(p.id, p.created_at, p.gconfig, p.prompt_tokens, len(p.choices), seeds)


@dataclass(slots=True)
class Delta:
    """Newly certain text of one choice, and the tokens sampled since its last delta."""

    message: MessageDelta
    output_ids: list[int]
    logprobs: list[float]
    top_logprobs: TopLogprobs | None = None
    index: int = 0
    calls: bool = False
    """Whether a call's tokens may be among these before it comes itself: of what is replayed."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one choice: the answer, and what is to be recorded."""

    choice: Choice
    parsed: ParsedMessage
    interaction: Interaction
    key: bytes
    """Chain key under which a continuation finds the interaction."""


Completed = Delta | Completion
