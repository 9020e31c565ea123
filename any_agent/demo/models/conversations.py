"""Conversations that a tiny model is taught from, token by token as the service continues them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from any_agent.chat import ChatFormat
from any_agent.demo.models.teach import Row, joined
from any_agent.types import Message

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
