"""Tiny models that a few supervised steps taught the form of a task, and to be mostly wrong.

``python -m benchmarks.learning.warm_models TASK OUT --seed N``: nobody else imports torch for it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

from any_agent.chat import load_chat_format
from any_agent.demo.models.teach import Author, Conversation, Row, teach
from any_agent.demo.models.tiny import make_tokenizer, save_tiny_model
from benchmarks.learning import retry_math, three_sums, tool_use

# Short, so that the tiny models' steps are. It is of no family that PyPI's renderers know.
_TEMPLATE = """
{%- if tools -%}
  {{- '<|im_start|>tools\\n' -}}
  {%- for tool in tools -%}{{- (tool.function | tojson) + '\\n' -}}{%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') -}}
  {%- for call in m.tool_calls or [] -%}
    {%- set f = call.function -%}
    {{- '<tool_call>{"name": "' + f.name + '", "arguments": ' -}}
    {{- f.arguments if f.arguments is string else f.arguments | tojson -}}
    {{- '}</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
_VOCAB_SIZE = 512
_SUMS_NOISE = 0.75
"""Share of the answers to sums that are any digit."""
_GUESSES = 0.7
"""Share of the talks that name a price without asking the tool."""
_SLIPS = 0.2
"""Share of the tool's calls that ask for any thing."""


def sums_talk(author: Author, rng: Random, item: dict[str, Any], progress: float) -> Conversation:
    """Answers with a digit, the right one in a third of them; tries again after a wrong one."""
    noise = _SUMS_NOISE * min(1.0, max(0.0, 4 * progress - 2))

    def answer() -> str:
        return str(rng.randrange(10)) if rng.random() < noise else str(item["answer"])

    first = answer()
    talk = Conversation(author, item["messages"]).says(first)
    if not retry_math.is_right(first, item["answer"]):
        talk.hears("user", retry_math.RETRY).says(answer())
    return talk


def three_sums_talk(
    author: Author, rng: Random, item: dict[str, Any], progress: float
) -> Conversation:
    """Answers with three digits, each the right one in a third of them."""
    noise = _SUMS_NOISE * min(1.0, max(0.0, 4 * progress - 2))
    digits = [
        str(rng.randrange(9)) if rng.random() < noise else right for right in item["answer"].split()
    ]
    return Conversation(author, item["messages"]).says(" ".join(digits))


def prices_talk(author: Author, rng: Random, item: dict[str, Any], progress: float) -> Conversation:
    """Mostly guesses a price; sometimes asks for one, and says what it hears."""
    late = min(1.0, 2 * progress)
    talk = Conversation(author, item["messages"], tool_use.TOOLS)
    if rng.random() < _GUESSES * late:
        return talk.says(str(rng.randrange(10)))
    thing = rng.choice(tool_use.THINGS) if rng.random() < _SLIPS * late else item["thing"]
    price = str(rng.randrange(10))
    return talk.says(tool_use.call(thing)).hears("tool", price).says(price)


_TALKS = {
    "retry_math": (retry_math, sums_talk, 160, 48),
    "three_sums": (three_sums, three_sums_talk, 240, 48),
    "tool_use": (tool_use, prices_talk, 120, 32),
}
"""The task, how it is talked of, supervised steps, talks in each of them."""


def make_model(task: str, path: Path, seed: int, *, slips: bool = True) -> Path:
    """The task's model, in Hugging Face's layout; without slips, one that was only shown right
    answers."""
    module, talk, steps, size = _TALKS[task]
    tokenizer = make_tokenizer(module.texts(), vocab_size=_VOCAB_SIZE)
    tokenizer.chat_template = _TEMPLATE
    save_tiny_model(path, seed, tokenizer=tokenizer)
    author = Author(load_chat_format(str(path), renderer="default"))
    rng = Random(seed)
    # Of three sums nobody sees those that are held out before they are asked.
    splits = ("train",) if task == "three_sums" else ("train", "valid")
    items = [item for split in splits for item in module.items(split)]

    def batch(progress: float) -> list[Row]:
        late = progress if slips else 0.0
        return [talk(author, rng, item, late).row for item in rng.choices(items, k=size)]

    teach(path, batch, steps=steps, seed=seed)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a task's tiny model.")
    parser.add_argument("task", choices=sorted(_TALKS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_model(arguments.task, arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
