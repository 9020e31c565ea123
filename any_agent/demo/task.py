"""The demo's tasks: echo the digit that the prompt names; add two numbers up to 20.

Prompts of the first are template x noun x digit; a fixed part of the (template, noun) pairs is held
out. Of the second, a fixed part of the pairs of numbers is, in both orders.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple, Protocol

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
NUMBERS = range(2, 21)
_HELD_OUT_PAIRS = 32
DISCOUNT = 0.9  # the share of a turn's reward that the turn before it gets


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt and its answer."""

    task_id: str
    prompt: str
    answer: str


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
    return (answer or "").strip() == item.answer


def score(right: Sequence[bool]) -> float:
    """Return a session's score: its last turn's outcome, discounted back, averaged over turns."""
    return float(right[-1]) * sum(DISCOUNT**k for k in range(len(right))) / len(right)


def messages(item: Item, system: str = SYSTEM) -> list[dict[str, str]]:
    """Return the first turn's messages, without a system prompt if it is empty."""
    question = {"role": "user", "content": item.prompt}
    return [{"role": "system", "content": system}, question] if system else [question]


def sums(*, held_out: bool) -> list[Item]:
    """Return every sum of one split, in a fixed order; the splits share no pair of numbers."""
    pairs = list(combinations_with_replacement(NUMBERS, 2))
    kept = set(random.Random(0).sample(pairs, _HELD_OUT_PAIRS))
    return [
        Item(f"{a}+{b}", f"What is {a} + {b}?", str(a + b))
        for a in NUMBERS
        for b in NUMBERS
        if ((min(a, b), max(a, b)) in kept) is held_out
    ]


def is_sum(answer: str | None, item: Item) -> bool:
    """Return whether the last number of the answer is the sum."""
    return re.findall(r"\d+", answer or "")[-1:] == [item.answer]


class Split(Protocol):
    def __call__(self, *, held_out: bool) -> list[Item]: ...


class Judge(Protocol):
    def __call__(self, answer: str | None, item: Item) -> bool: ...


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts and the answers that are right. An agent without ``retry`` answers once."""

    items: Split
    is_correct: Judge
    system: str = ""
    retry: str = ""
    """The message after a wrong first answer."""


ECHO = Task(items, is_correct, SYSTEM, RETRY)
# Without a system prompt the template puts in a longer one.
SUMS = Task(sums, is_sum, "You add numbers.")


def corpus() -> Iterator[str]:
    """Yield the text on which the tokenizer is trained."""
    for split in (False, True):
        for item in items(held_out=split):
            yield f"system\n{SYSTEM}"
            yield f"user\n{item.prompt}"
            yield f"assistant\n{item.answer}"
    yield from (f"user\n{RETRY}" for _ in range(100))


def shuffled(split: list[Item], seed: int) -> list[Item]:
    """Return the items in a seeded order."""
    out = list(split)
    random.Random(seed).shuffle(out)
    return out
