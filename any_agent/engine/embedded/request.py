"""One request as the loop sees it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from any_agent.engine.embedded.stops import StopMatcher
from any_agent.types import GenerationHyperparameters, StopReason


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended. ``matched`` for stops, ``message`` for aborts; ``failed``: our fault."""

    type: StopReason
    matched: str | int | None = None
    message: str | None = None
    failed: bool = False


@dataclass(eq=False, slots=True)
class Request:
    """One request inside the loop. Its lists only grow, so other threads may read a prefix."""

    rid: str
    input_ids: list[int]
    config: GenerationHyperparameters
    stop_ids: frozenset[int]
    matcher: StopMatcher | None = None
    stream: bool = True
    """Whether each step is reported, or only the end."""
    sink: Any = None
    """The caller's own; the loop passes it through."""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def reach(self) -> int:
        """The longest it can become, in tokens."""
        return len(self.input_ids) + self.config.max_new_tokens

    def accept(self, token: int, logprob: float, version: str) -> None:
        """Add one sampled token and decide whether it ends the output."""
        if not math.isfinite(logprob):
            self.finish = Finish("abort", message="the model's logits are not finite", failed=True)
            return
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stop_ids:
            self.finish = Finish("stop", token)
        elif self.matcher is not None and (matched := self.matcher.push(token)) is not None:
            self.finish = Finish("stop", matched)
        elif len(self.output_ids) >= self.config.max_new_tokens:
            self.finish = Finish("length")


Event: TypeAlias = tuple[Request, int, Finish | None]
"""A request, how many output tokens it has now, and its end."""


def similar_lengths(requests: list[Request], max_tokens: int) -> Iterator[list[Request]]:
    """Split into joint prefills that waste at most a third on padding."""
    group: list[Request] = []
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
