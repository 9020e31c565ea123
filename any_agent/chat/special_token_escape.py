"""Special tokens that a text only spells: they are kept from becoming control tokens.

An agent's text may hold ``<|im_end|>`` or ``<think>``, as what a tool read or a user pasted. A
tokenizer makes the control token of it, and so a web page could end the user's turn. Such a
spelling is broken up by a mark before the template writes it, and the text is encoded in the
pieces between the marks: the same characters, in plain tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from any_agent.types import Message, Tool

_SAID = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""What a model's own answer is made of stays as it is: templates look for it there."""


class SpecialTokenEscaper:
    """Breaks up the spellings of one vocabulary's added tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        known = sorted({t for t in tokens if len(t) > 1}, key=len, reverse=True)
        self._any = _one_of(known)
        self._not_said = _one_of([t for t in known if t not in _SAID])

    def broken_up(
        self, messages: list[Message], tools: list[Tool] | None
    ) -> tuple[list[Message], list[Tool] | None, str | None]:
        """Messages and tools with the mark in each spelling, and the mark; None if there is none.

        Everything that has no such spelling comes back as it was, the same objects.
        """
        tools_text = json.dumps(tools, ensure_ascii=False) if tools else ""
        if not self._any.search(tools_text) and not any(map(self._in_message, messages)):
            return messages, tools, None
        seen = {*tools_text, *json.dumps(messages, ensure_ascii=False)}
        mark = next(c for c in map(chr, range(0xE000, 0x110000)) if c not in seen)
        return (
            [self._message(m, mark) for m in messages],
            _walk(tools, lambda text: _break(self._any, text, mark)),
            mark,
        )

    def _in_message(self, message: Message) -> bool:
        for key, value in message.items():
            if not isinstance(value, str):
                value = json.dumps(value, ensure_ascii=False)
            if self._pattern(message, key).search(value):
                return True
        return False

    def _message(self, message: Message, mark: str) -> Message:
        broken: Message = {}
        for key, value in message.items():
            change = partial(_break, self._pattern(message, key), mark=mark)
            broken[key] = _walk(value, change)
        return broken

    def _pattern(self, message: Message, key: str) -> re.Pattern[str]:
        said = message["role"] == "assistant" and key in ("content", "reasoning_content")
        return self._not_said if said else self._any


def _one_of(tokens: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _break(pattern: re.Pattern[str], text: str, mark: str) -> str:
    # Again until none is left: a token may stand inside another one's rest.
    while pattern.search(text):
        text = pattern.sub(lambda m: m[0][0] + mark + m[0][1:], text)
    return text


def _walk(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_walk(k, change): _walk(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_walk(v, change) for v in value]
    return value
