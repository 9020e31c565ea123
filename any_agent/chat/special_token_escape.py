"""Escaping of special tokens that a text only spells, so that they stay plain text.

An agent's text may hold ``<|im_end|>`` or ``<think>``, which a tool read or a user pasted. A
tokenizer makes the control token of it, and so a web page could end the user's turn. A mark splits
such a spelling before the template writes it, and the text is encoded in the pieces between the
marks: the same characters, in plain tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from any_agent.types import Message, Tool

_ANSWER_TOKENS = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""Tokens that stay as they are in a model's own answer: templates look for them there."""


class SpecialTokenEscaper:
    """Splits the spellings of one vocabulary's added tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        known = sorted({t for t in tokens if len(t) > 1}, key=len, reverse=True)
        self._any = _one_of(known)
        self._in_answer = _one_of([t for t in known if t not in _ANSWER_TOKENS])

    def escape(
        self, messages: list[Message], tools: list[Tool] | None
    ) -> tuple[list[Message], list[Tool] | None, str | None]:
        """Return messages and tools with the mark in each spelling, and the mark, None if unused.

        Without any such spelling the same objects come back.
        """
        tools_text = json.dumps(tools, ensure_ascii=False) if tools else ""
        if not self._any.search(tools_text) and not any(map(self._has_spelling, messages)):
            return messages, tools, None
        seen = {*tools_text, *json.dumps(messages, ensure_ascii=False)}
        mark = next(c for c in map(chr, range(0xE000, 0x110000)) if c not in seen)
        return (
            [self._escape_message(m, mark) for m in messages],
            _map_texts(tools, partial(_split, self._any, mark=mark)),
            mark,
        )

    def _has_spelling(self, message: Message) -> bool:
        for key, value in message.items():
            if not isinstance(value, str):
                value = json.dumps(value, ensure_ascii=False)
            if self._pattern(message, key).search(value):
                return True
        return False

    def _escape_message(self, message: Message, mark: str) -> Message:
        escaped: Message = {}
        for key, value in message.items():
            change = partial(_split, self._pattern(message, key), mark=mark)
            escaped[key] = _map_texts(value, change)
        return escaped

    def _pattern(self, message: Message, key: str) -> re.Pattern[str]:
        is_answer = message["role"] == "assistant" and key in ("content", "reasoning_content")
        return self._in_answer if is_answer else self._any


def _one_of(tokens: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _split(pattern: re.Pattern[str], text: str, mark: str) -> str:
    # Repeat until none is left: a split may leave another token's spelling.
    while pattern.search(text):
        text = pattern.sub(lambda m: m[0][0] + mark + m[0][1:], text)
    return text


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_texts(k, change): _map_texts(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_texts(v, change) for v in value]
    return value
