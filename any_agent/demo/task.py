"""The demo's task: echo the digit that the prompt names.

Prompts are template x noun x digit; a fixed part of the (template, noun) pairs is held out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SYSTEM = "You answer with one digit."
RETRY = "Not correct, try again."
TEMPLATES = (
    "Say the digit {d}, {n}.",
    "Please write {d} for the {n}.",
    "The {n} wants the digit {d}.",
    "Which digit is {d}? Tell the {n}.",
    "Repeat {d} to the {n}.",
    "Give the {n} a {d}.",
)
NOUNS = ("cat", "dog", "bird", "fish", "horse", "teacher", "farmer", "baker", "pilot", "child")
_HELD_OUT_EVERY = 5
DISCOUNT = 0.9  # the share of a turn's reward that the turn before it gets


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt and the digit that answers it."""

    task_id: str
    prompt: str
    digit: str


class TaskTurn(NamedTuple):
    """One answer of the agent's model."""

    completion_id: str
    text: str
    tokens: int
    """Number of sampled tokens, as the completion's usage counts them."""


def items(*, held_out: bool) -> list[Item]:
    """Return every prompt of one split, in a fixed order; the splits share no prompt."""
    out = []
    for t, template in enumerate(TEMPLATES):
        for n, noun in enumerate(NOUNS):
            if ((t * len(NOUNS) + n) % _HELD_OUT_EVERY == 0) is not held_out:
                continue
            for d in range(10):
                prompt = template.format(d=d, n=noun)
                out.append(Item(f"t{t}-n{n}-d{d}", prompt, str(d)))
    return out


def is_correct(answer: str | None, item: Item) -> bool:
    """Return whether the answer is the digit, white space aside."""
    return (answer or "").strip() == item.digit


def score(right: Sequence[bool]) -> float:
    """Return a session's score: its last turn's outcome, discounted back, averaged over turns."""
    return float(right[-1]) * sum(DISCOUNT**k for k in range(len(right))) / len(right)


def messages(item: Item) -> list[dict[str, str]]:
    """Return the first turn's messages."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": item.prompt}]


def corpus() -> Iterator[str]:
    """Yield the text on which the tokenizer is trained."""
    for split in (False, True):
        for item in items(held_out=split):
            yield f"system\n{SYSTEM}"
            yield f"user\n{item.prompt}"
            yield f"assistant\n{item.digit}"
    yield from (f"user\n{RETRY}" for _ in range(100))


def shuffled(split: list[Item], seed: int) -> list[Item]:
    """Return the items in a seeded order."""
    out = list(split)
    random.Random(seed).shuffle(out)
    return out
