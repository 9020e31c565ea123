"""Sums of small numbers, with a second try after a wrong answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

RETRY = "Not correct, try again."
MAX_TURNS = 2
DISCOUNT = 0.9
_WORDINGS = ("What is {q}?", "Compute {q}.", "{q} = ?")
_HELD_OUT_EVERY = 5


def items(split: str) -> list[dict[str, Any]]:
    """The dataset. ``valid`` asks the same sums in other words."""
    numbers = range(5)
    facts = [(f"{a} + {b}", a + b) for a in numbers for b in numbers]
    facts += [(f"{a} - {b}", a - b) for a in numbers for b in range(a + 1)]
    return [
        {
            "task_id": f"f{f:02d}-w{w}",
            "messages": [{"role": "user", "content": wording.format(q=question)}],
            "answer": str(answer),
        }
        for f, (question, answer) in enumerate(facts)
        for w, wording in enumerate(_WORDINGS)
        if ((3 * f + w) % _HELD_OUT_EVERY == 0) is (split == "valid")
    ]


def is_right(said: str, answer: str) -> bool:
    return said.strip() == answer


def reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    **data: Any,
) -> float:
    """1 for the right digit."""
    return float(is_right(completions, data["answer"]))


def texts() -> Iterator[str]:
    """Yield the texts that the tokenizer is made of."""
    for split in ("train", "valid"):
        for item in items(split):
            yield f"user\n{item['messages'][0]['content']}"
            yield f"assistant\n{item['answer']}"
    yield from (f"user\n{RETRY}" for _ in range(100))
