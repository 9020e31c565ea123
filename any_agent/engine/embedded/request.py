"""A request inside the generation loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from any_agent.engine.embedded.sampler import LogitsProcessor
from any_agent.engine.embedded.stops import StopMatcher
from any_agent.engine.embedded.variant import Variant
from any_agent.errors import AnyAgentError, EngineUnavailable
from any_agent.types import GenerationHyperparameters, StopReason


@dataclass(frozen=True, slots=True)
class FinishReason:
    """The reason for a request's end: ``matched`` for stops, ``message`` for aborts."""

    type: StopReason
    matched: str | int | None = None
    message: str | None = None
    error: AnyAgentError | None = None
    """The error of a failed request: its caller gets this, and nothing of the output."""

    @classmethod
    def failure(cls, error: AnyAgentError) -> FinishReason:
        return cls("abort", message=error.message, error=error)


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One request inside the loop. Its lists only grow, so other threads may read a prefix."""

    rid: str
    variant: Variant
    input_ids: list[int]
    config: GenerationHyperparameters
    stop_ids: frozenset[int]
    matcher: StopMatcher | None = None
    stream: bool = True
    """True to report each step, False to report only the end."""
    processor: LogitsProcessor | None = None
    adapter: str | None = None
    """The fixed adapter that samples it, by name and fingerprint; None: its variant alone."""
    top: int = 0
    """The number of likeliest tokens to store at each position."""
    sink: Any = None
    """An object of the caller, which the loop passes through."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    bound: list[bool] = field(default_factory=list)
    """True for each token that the grammar decided; empty without a grammar."""
    changes: list[tuple[int, str]] = field(default_factory=list)
    """The output positions from which on another weight version sampled."""
    finish: FinishReason | None = None
    cached_tokens: int = 0
    """The number of prompt tokens whose states were copied, not computed."""

    @property
    def adapter_key(self) -> str | None:
        """The key of the adapter, fixed or live, that its row gets."""
        return self.variant.adapter if self.adapter is None else self.adapter

    @property
    def prompt(self) -> tuple[str | None, tuple[int, ...]]:
        """The adapter and the ids, which decide on the states of its prompt."""
        return self.adapter_key, tuple(self.input_ids)

    @property
    def has_grammar(self) -> bool:
        return self.processor is not None and self.processor.grammar is not None

    @property
    def position(self) -> int:
        """The next token's position, counted from the prompt's first token."""
        return len(self.input_ids) + len(self.output_ids)

    @property
    def reach(self) -> int:
        """The most tokens that the request can have."""
        return len(self.input_ids) + self.config.max_new_tokens

    def spans(self, count: int) -> list[tuple[str, int, int]]:
        """Return (version, start, end) over the first ``count`` output tokens, half-open."""
        found = []
        for i, (start, version) in enumerate(self.changes):
            end = self.changes[i + 1][0] if i + 1 < len(self.changes) else count
            if start < count:
                found.append((version, start, min(end, count)))
        return found

    def versions(self, start: int, end: int) -> list[str]:
        """Return the version of each output token in [start, end)."""
        out: list[str] = []
        for version, first, last in self.spans(end):
            out += [version] * (last - max(first, start))
        return out

    def likeliest(self, start: int, end: int) -> list[list[tuple[int, float]]]:
        """Return the likeliest possible tokens of each position in [start, end)."""
        return [
            [(token, logprob) for token, logprob in top if math.isfinite(logprob)]
            for top in self.tops[start:end]
        ]

    def accept(self, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> None:
        """Add one token that its variant sampled, and decide if it ends the output."""
        if not math.isfinite(logprob):
            self.finish = FinishReason.failure(
                EngineUnavailable("the model's logits are not finite: check its weights")
            )
            return
        processor = self.processor
        grammar = processor.grammar if processor is not None else None
        if processor is not None:
            processor.push(token)
            if grammar is not None:
                if (error := grammar.error) is not None:
                    self.finish = FinishReason.failure(error)
                    return
                self.bound.append(processor.bound)
        self.logprobs.append(logprob)
        if self.top:
            self.tops.append(top)
        self.output_ids.append(token)
        version = self.variant.version
        if not self.changes or self.changes[-1][1] != version:
            self.changes.append((len(self.output_ids) - 1, version))
        if token in self.stop_ids:
            self.finish = FinishReason("stop", token)
        elif self.matcher is not None and (matched := self.matcher.push(token)) is not None:
            self.finish = FinishReason("stop", matched)
        elif grammar is not None and grammar.ended:
            self.finish = FinishReason("stop", token)
        elif len(self.output_ids) >= self.config.max_new_tokens:
            self.finish = FinishReason("length")


Event: TypeAlias = tuple[EngineRequest, int, FinishReason | None]
"""A request, the number of its output tokens, and its end if it came."""


def similar_lengths(
    requests: list[EngineRequest], max_tokens: int
) -> Iterator[list[EngineRequest]]:
    """Split requests into joint prefills that waste at most a third on padding."""
    group: list[EngineRequest] = []
    real = 0
    for request in sorted(requests, key=lambda r: len(r.input_ids)):
        length = len(request.input_ids)
        padded = (len(group) + 1) * length
        if group and (padded > max_tokens or padded > 1.5 * (real + length)):
            yield group
            group, real = [], 0
        group.append(request)
        real += length
    if group:
        yield group
