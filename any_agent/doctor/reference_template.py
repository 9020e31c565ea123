"""The model's own chat template, which the renderer and the parser are compared with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from any_agent.chat import ChatFormat
from any_agent.chat.bridge import TemplateRenderer
from any_agent.chat.tool_visibility import tool_visibility
from any_agent.doctor.verdict import Unchecked
from any_agent.types import Message, Tool

NO_TOOLS = "the template shows no tools: a call with tools gets 400 unsupported_parameter"
_OWN_ADVICE = (
    "the model's own template is used already, so no renderer helps: correct chat_template, or "
    "serve the model without training (--no-train)"
)
_THINKING = re.compile(
    r"<think>.*?</think>\s*|<\|channel\|>analysis<\|message\|>.*?<\|end\|>", re.DOTALL
)


class TemplateRefused(Unchecked):
    """The template does not accept the conversation."""


@dataclass(frozen=True, slots=True)
class TemplateTurn:
    """A conversation, and the answer that follows it as the template writes it."""

    messages: list[Message]
    tools: list[Tool] | None
    answer: Message
    output: str
    """The answer's text, up to and with the token that ends it."""
    output_ids: list[int]


class ReferenceTemplate:
    """The tokenizer's template, with the run's ``kwargs`` such as ``enable_thinking``."""

    def __init__(self, chat: ChatFormat, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = chat.tokenizer
        self._kwargs = dict(kwargs)
        self.is_own = isinstance(chat.renderer, TemplateRenderer)
        """True if the service uses this template instead of a renderer."""
        showing = tool_visibility(chat)
        self.shows_tools = showing.tools
        self.takes_tools = showing.tools or showing.calls
        self._ends = {i: chat.decode([i]) for i in chat.stop_token_ids}

    @property
    def exists(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def advice(self, otherwise: str) -> str:
        """Return the advice after a failure; ``otherwise`` holds while a renderer is used."""
        return _OWN_ADVICE if self.is_own else otherwise

    def ids(self, messages: Sequence[Message], tools: list[Tool] | None) -> list[int]:
        """Return the prompt's ids. Raises TemplateRefused."""
        return list(self._apply(messages, tools, prompt=True, tokenize=True))

    def text(
        self, messages: Sequence[Message], tools: list[Tool] | None, *, prompt: bool = True
    ) -> str:
        """Return the text with the generation prompt, or without. Raises TemplateRefused."""
        return str(self._apply(messages, tools, prompt=prompt, tokenize=False))

    def turn(
        self, messages: list[Message], tools: list[Tool] | None, answer: Message, then: Message
    ) -> TemplateTurn:
        """Return the answer as the model would have sampled it. Raises TemplateRefused.

        Some templates end a turn only at the start of the next one, so ``then`` may be appended.
        """
        prompt = self.text(messages, tools)
        thought = ""
        if prompt.rstrip().endswith("<think>"):
            # The generation prompt opens the reasoning; the template itself never writes any.
            answer = {"reasoning_content": "Well.", **answer}
            thought = f"{answer['reasoning_content']}\n</think>\n\n"
        for more in ([], [then]):
            whole = self.text([*messages, answer, *more], tools, prompt=False)
            if whole.startswith(prompt):
                text = whole[len(prompt) :]
            elif thought and whole.startswith(head := prompt[: prompt.rindex("<think>")]):
                text = thought + whole[len(head) :]
            else:
                continue
            ends = [(at, end) for end in self._ends.values() if (at := text.find(end)) >= 0]
            if ends:
                at, end = min(ends)
                output = text[: at + len(end)]
                ids = list(self._tokenizer.encode(output, add_special_tokens=False))
                return TemplateTurn(messages, tools, answer, output, ids)
        raise TemplateRefused("the template writes no such turn after its own generation prompt")

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
            # A template is foreign code: it may raise any error.
            code = "; such a call gets 400 template_error" if self.is_own else ""
            seen = f"the template refuses it: {type(error).__name__}: {error}{code}"
            raise TemplateRefused(seen) from error


def without_thinking(text: str) -> str:
    return _THINKING.sub("", text)
