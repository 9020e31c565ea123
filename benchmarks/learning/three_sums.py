"""Three sums in one answer, which is right only if all three are: a reward that comes rarely."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

SUMS = 3
_ITEMS = 600
_HELD_OUT_EVERY = 10


def items(split: str) -> list[dict[str, Any]]:
    """The dataset. ``valid`` has other threes of the same sums."""
    facts = [(f"{a} + {b}", a + b) for a in range(5) for b in range(5)]
    draw = random.Random(0)
    threes = draw.sample(list(itertools.product(facts, repeat=SUMS)), _ITEMS)
    return [
        {
            "task_id": f"t{k:03d}",
            "messages": [{"role": "user", "content": ", ".join(sum_ for sum_, _ in three)}],
            "answer": " ".join(str(answer) for _, answer in three),
        }
        for k, three in enumerate(threes)
        if (k % _HELD_OUT_EVERY == 0) is (split == "valid")
    ]


def is_right(said: str, answer: str) -> bool:
    return said.split() == answer.split()


def texts() -> Iterator[str]:
    """Yield the texts that the tokenizer is made of."""
    for item in items("train"):
        yield f"user\n{item['messages'][0]['content']}"
        yield f"assistant\n{item['answer']}"
