"""A tiny model that, once the opening of a call is given, adds the wrong numbers every second time.

``python model.py OUT``. It never learns to begin a call: what is trained on is what follows a
forced opening.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from any_agent.chat import load_chat_format
from any_agent.demo.models.sums import texts
from any_agent.demo.models.teach import Author, Conversation, Row, teach
from any_agent.demo.models.tiny import make_tokenizer, save_tiny_model

LARGEST = 4  # the largest number that it adds
_NAMES = ("add", "final_answer")
_SYSTEMS = ("Use your tools.", "You are a helpful assistant.")
_WRONG = 0.6  # share of the calls whose second number is any
_STEPS, _BATCH, _POOL = 240, 24, 1200
_VOCAB_SIZE, _CONTEXT = 1024, 4096


def _row(author: Author, rng: Random, noise: float) -> Row:
    a, b = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    name, question = rng.choice(_NAMES), f"What is {a} + {b}?"
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    if rng.random() < 0.5:
        messages[0]["content"] = f"New task:\n{question}"
    if rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": rng.choice(_SYSTEMS)})
    talk = Conversation(author, messages, [_tool(rng, name)])
    opening = author.chat.open_call(talk.prompt, name)
    assert opening is not None
    given = rng.randint(0, LARGEST) if rng.random() < _WRONG * noise else b
    arguments = json.dumps({"a": a, "b": given})
    # Encoded apart, as the service does: what follows begins with a token of its own.
    return talk.begins(opening, taught=False).says(f" {arguments}}}\n</tool_call>").row


def _tool(rng: Random, name: str) -> dict[str, Any]:
    """Return the tool in one of the forms in which the frameworks describe it."""
    titles, described, closed = (rng.random() < 0.5 for _ in range(3))

    def number(title: str) -> dict[str, Any]:
        return {
            **({"title": title} if titles else {}),
            "type": "integer",
            **({"description": "A number."} if described else {}),
        }

    schema: dict[str, Any] = {
        "properties": {"a": number("A"), "b": number("B")},
        "required": ["a", "b"],
        "type": "object",
    }
    if closed:
        schema |= {"title": f"{name}_args", "additionalProperties": False}
    function = {"name": name, "description": "Adds two numbers.", "parameters": schema}
    return {"type": "function", "function": function | ({"strict": True} if closed else {})}


def _texts() -> Iterator[str]:
    rng = Random(0)
    for _ in range(200):
        yield json.dumps(_tool(rng, rng.choice(_NAMES)))
        yield "user\nNew task:\nWhat is 1 + 2?"
    yield from texts()


def make_model(path: Path, seed: int = 0) -> Path:
    """Write the model in Hugging Face's layout."""
    tokenizer = make_tokenizer(_texts(), vocab_size=_VOCAB_SIZE, phrases=True)
    save_tiny_model(path, seed, tokenizer=tokenizer, context=_CONTEXT)
    author, rng = Author(load_chat_format(str(path), enable_thinking=False)), Random(seed)
    # First the model learns right calls, then the share of wrong ones.
    right, noisy = ([_row(author, rng, noise) for _ in range(_POOL)] for noise in (0.0, 1.0))

    def batch(progress: float) -> list[Row]:
        return rng.choices(noisy if progress > 0.7 else right, k=_BATCH)

    teach(path, batch, steps=_STEPS, seed=seed)
    return path


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
