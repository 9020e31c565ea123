"""Supervised training of tiny models on conversations, in the service's exact tokens.

The demo's model is trained on noisy labels: it answers with one digit and ends its turn, and is
right in about three of ten answers, so reinforcement learning finds something in every group and
has most of the way left to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.demo.task import RETRY, Item, items, messages
from any_agent.types import Message

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Report: TypeAlias = Callable[[str], object]
"""Called at each step of some work with a word on how far it is."""

DIGITS = "0123456789"
_END = "<|im_end|>"
_BATCH = 64  # conversations of a step of the demo's model
_NOISE = 0.7
_LEARNING_RATE = 4e-3
_IGNORED = -100  # the label of a token that is not trained on
_PART = 4096  # the most tokens, with padding, in one pass through the model


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation's token ids, and the same ids as labels for the answers."""

    ids: list[int]
    labels: list[int]


class Author:
    """An encoder of conversations that writes the tokens of the service; it caches their parts."""

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self._known: dict[Any, list[int]] = {}

    def prompt(self, messages: list[Message], tools: list[Any] | None) -> list[int]:
        return self._cached(
            repr((messages, tools)), lambda: list(self.chat.render(messages, tools or None))
        )

    def text(self, text: str) -> list[int]:
        """Encode a part of an answer; calls of tools are spelled out."""
        return self._cached((text,), lambda: self.chat.encode(text, special=False))

    def answer(self, text: str) -> list[int]:
        """Encode an answer, with the token that ends it."""
        return self.text(text + _END)

    def between(self, talk: Conversation, new: Message) -> list[int]:
        """Encode the tokens between the last answer and the next one, with a new message."""
        last = talk.answers[-1]

        def make() -> list[int]:
            message = self.chat.parse(last, prompt_ids=talk.prompt, tools=talk.tools).to_message()
            if new["role"] == "tool":
                new["tool_call_id"] = message["tool_calls"][0]["id"]
            ids = self.chat.bridge(last, [new], talk.tools, answer=message)
            if ids is None:
                raise AssertionError("a later turn must continue the earlier one exactly")
            return list(ids)

        return self._cached((tuple(last), new["role"], new["content"]), make)

    def _cached(self, key: Any, make: Callable[[], list[int]]) -> list[int]:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


class Conversation:
    """One conversation; the model learns its own answers."""

    def __init__(
        self, author: Author, messages: list[Message], tools: list[Any] | None = None
    ) -> None:
        self._author = author
        self.tools = tools or None
        self.prompt = author.prompt(messages, self.tools)
        self.answers: list[list[int]] = []
        self._parts: list[tuple[list[int], bool]] = [(self.prompt, False)]

    def says(self, text: str) -> Conversation:
        """Add an answer of the model."""
        self.answers.append(self._author.answer(text))
        self._parts.append((self.answers[-1], True))
        return self

    def begins(self, text: str, *, taught: bool) -> Conversation:
        """Add the beginning of an answer; ``taught``: the model learns it."""
        self._parts.append((self._author.text(text), taught))
        return self

    def hears(self, role: str, content: str) -> Conversation:
        """Add the message after an answer."""
        new: Message = {"role": role, "content": content}
        self._parts.append((self._author.between(self, new), False))
        return self

    @property
    def row(self) -> Row:
        return joined(self._parts)


def noisy_row(author: Author, item: Item, noise: float, rng: Random) -> Row:
    """Return a conversation about one of the demo's prompts.

    An answer is right, or with probability ``noise`` any digit; a wrong first answer gets a retry.
    """

    def answer() -> str:
        return rng.choice(DIGITS) if rng.random() < noise else item.answer

    first = answer()
    talk = Conversation(author, [*messages(item)]).says(first)
    if first != item.answer:
        talk.hears("user", RETRY).says(answer())
    return talk.row


def quiet(_: str) -> None:
    """Report nothing."""


def warm_up(path: Path, *, steps: int = 80, seed: int = 0, report: Report = quiet) -> None:
    """Train the demo's model at ``path`` in place, on one CPU thread.

    The noise limits its accuracy to ``1 - 0.9 * _NOISE``. It rises from 0 over the first half of
    the steps, in which every seed learns to read the prompt.
    """
    author = Author(load_chat_format(str(path), enable_thinking=False))
    rng, prompts = Random(seed), items(held_out=False)

    def batch(progress: float) -> list[Row]:
        noise = _NOISE * min(1.0, 2 * progress)
        return [noisy_row(author, item, noise, rng) for item in rng.choices(prompts, k=_BATCH)]

    teach(path, batch, steps=steps, seed=seed, report=report)


def teach(
    path: Path,
    batch: Callable[[float], Sequence[Row]],
    *,
    steps: int,
    seed: int = 0,
    report: Report = quiet,
) -> None:
    """Train the model at ``path`` in place by supervised steps, on one CPU thread.

    ``batch`` returns a step's rows; its argument is the finished share of the steps. The learning
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
        report(f"step {step} of {steps}")
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * min(1.0, 2 - 2 * step / steps)
        optimizer.zero_grad()
        _backward(model, batch(step / steps))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval().save_pretrained(path)


def joined(parts: Iterable[tuple[Sequence[int], bool]]) -> Row:
    """Join token ids to one row; the model learns those that are marked True."""
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
    """Add the gradient of the mean cross-entropy over the answers' tokens of all rows."""
    import torch

    trained = sum(label != _IGNORED for row in rows for label in row.labels)
    for some in _parts(rows):
        torch.autograd.backward(_loss(model, some) / trained)


def _parts(rows: Sequence[Row]) -> list[list[Row]]:
    """Divide the rows, sorted by length, into parts of at most ``_PART`` tokens."""
    parts: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if not parts or len(row.ids) * (len(parts[-1]) + 1) > _PART:
            parts.append([])
        parts[-1].append(row)
    return parts


def _loss(model: PreTrainedModel, rows: Sequence[Row]) -> torch.Tensor:
    """Return the summed cross-entropy over the answers' tokens.

    Rows are padded right, where causal attention never looks, so no mask is needed.
    """
    import torch

    ids = _padded([row.ids for row in rows], 0)
    labels = _padded([row.labels for row in rows], _IGNORED)[:, 1:]
    trained = labels != _IGNORED
    hidden: Any = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    logits = model.lm_head(hidden[trained])
    return torch.nn.functional.cross_entropy(logits, labels[trained], reduction="sum")
