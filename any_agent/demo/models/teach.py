"""Teaches the tiny model the form of an answer, and to be mostly wrong about its content.

A few supervised steps on noisy labels. Afterwards the model answers with one digit and ends its
turn, and names the right digit in about three of ten answers: reinforcement learning has
something to find in every group, and most of the way is left to go.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from any_agent.demo.task import RETRY, Item, items, messages

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast
from any_agent.chat import ChatFormat
from any_agent.types import Message

DIGITS = "0123456789"
_IGNORED = -100
_PART = 4096
"""Tokens, padding included, in one pass through the model."""


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation's token ids, and the same as labels where an answer stands."""

    ids: list[int]
    labels: list[int]


class NoisyConversations:
    """Conversations about training prompts, token by token as the service renders them.

    An answer is right, or with probability ``noise`` any digit; a wrong first one gets a retry.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        from renderers import Qwen3RendererConfig, create_renderer

        config = Qwen3RendererConfig(enable_thinking=False, thinking_retention="all")
        self._renderer = create_renderer(tokenizer, config)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._answers = {d: [*tokenizer.encode(d, add_special_tokens=False), end] for d in DIGITS}
        self._items = items(held_out=False)
        self._prompts = {item.task_id: self._render(messages(item)) for item in self._items}
        self._retry = self._between_turns(self._items[0])
        self._random = random.Random(seed)

    def batch(self, size: int, noise: float) -> list[Row]:
        """``size`` rows about random prompts."""
        return [self._row(item, noise) for item in self._random.choices(self._items, k=size)]

    def _row(self, item: Item, noise: float) -> Row:
        prompt = self._prompts[item.task_id]
        first = self._label(item, noise)
        parts = [(prompt, False), (self._answers[first], True)]
        if first != item.digit:
            second = self._answers[self._label(item, noise)]
            parts += [(self._retry, False), (second, True)]
        return joined(parts)

    def _label(self, item: Item, noise: float) -> str:
        return self._random.choice(DIGITS) if self._random.random() < noise else item.digit

    def _render(self, talk: list[dict[str, str]]) -> list[int]:
        return list(self._renderer.render_ids(talk, add_generation_prompt=True))

    def _between_turns(self, item: Item) -> list[int]:
        """What stands between a first answer and the second one."""
        turns = [("assistant", item.digit), ("user", RETRY)]
        talk = [*messages(item), *({"role": r, "content": c} for r, c in turns)]
        before = self._prompts[item.task_id] + self._answers[item.digit]
        whole = self._render(talk)
        if whole[: len(before)] != before:
            raise AssertionError("the retry does not continue the first turn token by token")
        return whole[len(before) :]


def warm_up(
    path: Path,
    *,
    steps: int = 80,
    seed: int = 0,
    noise: float = 0.7,
    batch_size: int = 64,
    learning_rate: float = 4e-3,
) -> None:
    """Train the model at ``path`` in place, on one CPU thread.

    ``noise`` bounds the accuracy that is reached: ``1 - 0.9 * noise``. It rises from 0 over the
    first half of the steps, so that every seed has learned to read the prompt by then; the
    learning rate falls over the second half.
    """
    from transformers import AutoTokenizer

    talks = NoisyConversations(AutoTokenizer.from_pretrained(path), seed)

    def batch(progress: float) -> list[Row]:
        return talks.batch(batch_size, noise * min(1.0, 2 * progress))

    teach(path, batch, steps=steps, seed=seed, learning_rate=learning_rate)


def teach(
    path: Path,
    batch: Callable[[float], Sequence[Row]],
    *,
    steps: int,
    seed: int = 0,
    learning_rate: float = 4e-3,
) -> None:
    """Supervised steps on the model at ``path``, in place, on one CPU thread.

    ``batch`` gives a step's rows; it is told which part of the steps has been made. The learning
    rate falls over the second half of them.
    """
    import torch
    from transformers import AutoModelForCausalLM

    # Two threads on a model this small are many times slower when the cores are shared.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, 2 - 2 * step / steps)
        optimizer.zero_grad()
        _backward(model, batch(step / steps))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval().save_pretrained(path)


def joined(parts: Iterable[tuple[Sequence[int], bool]]) -> Row:
    """One row of ids one after the other; of those marked True the model learns to say them."""
    row = Row([], [])
    for ids, trained in parts:
        row.ids.extend(ids)
        row.labels.extend(ids if trained else [_IGNORED] * len(ids))
    return row


def _padded(rows: Sequence[list[int]], fill: int) -> torch.Tensor:
    import torch

    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def _backward(model: PreTrainedModel, rows: Sequence[Row]) -> None:
    """Mean cross-entropy over the answers' tokens of all rows, those of like length together."""
    import torch

    trained = sum(label != _IGNORED for row in rows for label in row.labels)
    for some in _parts(rows):
        torch.autograd.backward(_loss(model, some) / trained)


def _parts(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows in parts of so many tokens, padding and all."""
    parts: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if not parts or len(row.ids) * (len(parts[-1]) + 1) > _PART:
            parts.append([])
        parts[-1].append(row)
    return parts


def _loss(model: PreTrainedModel, rows: Sequence[Row]) -> torch.Tensor:
    """Summed cross-entropy over the answers' tokens. Rows are padded right: causal attention
    never looks there, so no mask is needed."""
    import torch

    ids = _padded([row.ids for row in rows], 0)
    labels = _padded([row.labels for row in rows], _IGNORED)[:, 1:]
    trained = labels != _IGNORED
    hidden: Any = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    logits = model.lm_head(hidden[trained])
    return torch.nn.functional.cross_entropy(logits, labels[trained], reduction="sum")


_END = "<|im_end|>"


class Author:
    """Writes conversations as the service does under one chat format."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self._known: dict[Any, list[int]] = {}

    def prompt(self, messages: list[Message], tools: list[Any] | None) -> list[int]:
        return self._once(
            repr((messages, tools)), lambda: list(self.chat.render(messages, tools or None))
        )

    def text(self, text: str) -> list[int]:
        """A part of an answer; calls of tools are spelled out."""
        return self._once((text,), lambda: self.chat.encode(text, special=False))

    def answer(self, text: str) -> list[int]:
        """A whole one, with the token that ends it."""
        return self.text(text + _END)

    def between(self, talk: Conversation, new: Message) -> list[int]:
        """What follows the talk's last answer when this message comes next."""
        said = talk.answers[-1]

        def make() -> list[int]:
            message = self.chat.parse(said, prompt_ids=talk.prompt, tools=talk.tools).to_message()
            if new["role"] == "tool":
                new["tool_call_id"] = message["tool_calls"][0]["id"]
            ids = self.chat.bridge(said, [new], talk.tools, answer=message)
            if ids is None:
                raise AssertionError("a later turn must continue the earlier one exactly")
            return list(ids)

        return self._once((tuple(said), new["role"], new["content"]), make)

    def _once(self, key: Any, make: Callable[[], list[int]]) -> list[int]:
        """Many conversations have much in common."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


class Conversation:
    """One conversation; what the model says in it is what it is to learn."""

    def __init__(
        self, author: Author, messages: list[Message], tools: list[Any] | None = None
    ) -> None:
        self._author = author
        self.tools = tools or None
        self.prompt = author.prompt(messages, self.tools)
        self.answers: list[list[int]] = []
        self._parts: list[tuple[list[int], bool]] = [(self.prompt, False)]

    def says(self, text: str) -> Conversation:
        """An answer of the model."""
        self.answers.append(self._author.answer(text))
        self._parts.append((self.answers[-1], True))
        return self

    def begins(self, text: str, *, taught: bool) -> Conversation:
        """The beginning of an answer, which the model is to learn or finds written."""
        self._parts.append((self._author.text(text), taught))
        return self

    def hears(self, role: str, content: str) -> Conversation:
        """The message that follows its answer."""
        new: Message = {"role": role, "content": content}
        self._parts.append((self._author.between(self, new), False))
        return self

    @property
    def row(self) -> Row:
        return joined(self._parts)
