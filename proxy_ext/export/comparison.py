"""The parts that ways of a replay share: compared log-probabilities, sampling, shown answers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from any_agent.runtime.command_line import printable
from any_agent.types import GenerationHyperparameters, Message

_MAX_EXPONENT = 700.0  # e to a larger power is no float
_MAX_SHOWN = 600  # characters of an answer that are printed


@dataclass(frozen=True, slots=True)
class Comparison:
    """The log-probabilities of the same tokens under two weights, in nats."""

    recorded_mean: float
    mean: float
    difference_mean: float
    """The mean of the absolute differences."""
    difference_max: float
    difference_max_at: int
    """The place of the token that differs most, from 0."""
    ratio: float
    """The geometric mean of the tokens' probabilities, each divided by the recorded one."""

    @classmethod
    def of(cls, recorded: Sequence[float], now: Sequence[float]) -> Comparison | None:
        """Compare; None without a token."""
        if not now:
            return None
        differences = [b - a for a, b in zip(recorded, now, strict=True)]
        sizes = list(map(abs, differences))
        count = len(now)
        return cls(
            math.fsum(recorded) / count,
            math.fsum(now) / count,
            math.fsum(sizes) / count,
            max(sizes),
            sizes.index(max(sizes)),
            math.exp(min(math.fsum(differences) / count, _MAX_EXPONENT)),
        )


def not_comparable(adapter: str) -> str:
    """Return why a call that an adapter sampled is left out."""
    return f"sampled by the adapter {adapter}: other weights than the policy's, not comparable"


def sampling_of(
    recorded: GenerationHyperparameters, arguments: argparse.Namespace
) -> GenerationHyperparameters:
    """Return the sampling of a new answer, by ``--sampling`` and ``--max-tokens``."""
    wanted = recorded.new(seed=None)
    if arguments.sampling == "greedy":
        wanted = wanted.new(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
    if arguments.max_tokens is not None:
        wanted = wanted.new(max_new_tokens=min(arguments.max_tokens, wanted.max_new_tokens))
    return wanted


def shown_message(name: str, message: Message) -> Iterator[str]:
    """Yield the lines that print a message, the first one behind its name."""
    parts = [str(message.get("content") or "")]
    if reasoning := message.get("reasoning_content"):
        parts.insert(0, f"(reasoning) {reasoning}")
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    text = "\n".join(filter(None, parts)) or "(empty)"
    if len(text) > _MAX_SHOWN:
        text = f"{text[:_MAX_SHOWN]} … ({len(text) - _MAX_SHOWN} more characters)"
    for k, line in enumerate(text.splitlines()):
        yield f"{name if k == 0 else '':<9} {printable(line)}"
