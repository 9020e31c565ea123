"""The model's own chat template, asked directly: what everything else is compared with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from any_agent.chat import ChatFormat
from any_agent.chat.bridge import TemplateRenderer
from any_agent.chat.tool_visibility import tool_visibility
from any_agent.types import Message, Tool

NO_TOOLS = "the template shows no tools: a call with tools gets 400 unsupported_parameter"
OWN_ADVICE = (
    "the model's own template is used already, so no renderer helps: correct chat_template, or "
    "serve the model without training (--no-train)"
)
_THINKING = re.compile(
    r"<think>.*?</think>\s*|<\|channel\|>analysis<\|message\|>.*?<\|end\|>", re.DOTALL
)


class TemplateRefused(Exception):
    """The template does not take such a conversation."""


@dataclass(frozen=True, slots=True)
class TemplateTurn:
    """A conversation up to an assistant's answer, and that answer as the template writes it."""

    messages: list[Message]
    tools: list[Tool] | None
    answer: Message
    output: str
    """The answer's text, up to and with the token that ends it where there is one."""
    output_ids: list[int]
    ended: bool


class ReferenceTemplate:
    """``kwargs`` are what the run gives the template, such as ``enable_thinking``."""

    def __init__(self, chat: ChatFormat, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = chat.tokenizer
        self._kwargs = dict(kwargs)
        self.is_own = isinstance(chat.renderer, TemplateRenderer)
        """Whether the service writes with this template, not with a renderer."""
        showing = tool_visibility(chat)
        self.shows_tools = showing.tools
        self.takes_tools = showing.tools or showing.calls
        self._ends = {i: chat.decode([i]) for i in chat.stop_token_ids}

    @property
    def exists(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def ids(self, messages: Sequence[Message], tools: list[Tool] | None) -> list[int]:
        """The prompt's. Raises Refused."""
        return list(self._apply(messages, tools, prompt=True, tokenize=True))

    def text(
        self, messages: Sequence[Message], tools: list[Tool] | None, *, prompt: bool = True
    ) -> str:
        """With the generation prompt, or without. Raises Refused."""
        return str(self._apply(messages, tools, prompt=prompt, tokenize=False))

    def turn(
        self, messages: list[Message], tools: list[Tool] | None, answer: Message, then: Message
    ) -> TemplateTurn:
        """The answer as the model would have sampled it. Raises Refused.

        Some templates end a turn with what begins the next one, so it may take ``then`` to see it.
        """
        prompt = self.text(messages, tools)
        thought = ""
        if prompt.rstrip().endswith("<think>"):
            # It opens reasoning for the model, and never writes any itself.
            answer = {"reasoning_content": "Well.", **answer}
            thought = f"{answer['reasoning_content']}\n</think>\n\n"
        for more in ([], [then]):
            whole = self.text([*messages, answer, *more], tools, prompt=False)
            if whole.startswith(prompt):
                said = whole[len(prompt) :]
            elif thought and whole.startswith(head := prompt[: prompt.rindex("<think>")]):
                said = thought + whole[len(head) :]
            else:
                continue
            ends = [(at, end) for end in self._ends.values() if (at := said.find(end)) >= 0]
            if ends:
                at, end = min(ends)
                output = said[: at + len(end)]
                return TemplateTurn(
                    messages, tools, answer, output, self.encode(output), ended=True
                )
        raise TemplateRefused("the template writes no such turn after its own generation prompt")

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _apply(
        self, messages: Sequence[Message], tools: list[Tool] | None, *, prompt: bool, tokenize: bool
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                add_generation_prompt=prompt,
                tokenize=tokenize,
                **({"return_dict": False} if tokenize else {}),
                **self._kwargs,
            )
        except Exception as error:
            # A template is foreign code, and says no in any way it likes.
            code = "; such a call gets 400 template_error" if self.is_own else ""
            said = f"the template refuses it: {type(error).__name__}: {error}{code}"
            raise TemplateRefused(said) from error


def without_thinking(text: str) -> str:
    return _THINKING.sub("", text)
