"""The chat format of whatever a caller has: made once, as it takes a second."""

from __future__ import annotations

from functools import lru_cache
from os import PathLike
from typing import Any, Literal

from any_agent.chat.format import ChatFormat
from any_agent.chat.load import chat_format_of, load_chat_format


def chat_format_for(
    tokenizer: ChatFormat | str | PathLike[str] | Any,
    *,
    renderer: str = "auto",
    enable_thinking: bool | None = None,
    thinking_retention: Literal["all", "tool_cycle", "template"] = "all",
) -> ChatFormat:
    """Of a tokenizer of transformers, or of the path or hub name of one; a chat format is itself.

    Settings and errors are those of :func:`~any_agent.chat.chat_format_of`.
    """
    if isinstance(tokenizer, ChatFormat):
        return tokenizer
    if isinstance(tokenizer, str | PathLike):
        return _loaded(str(tokenizer), renderer, enable_thinking, thinking_retention)
    template = getattr(tokenizer, "chat_template", None)
    # A template may be set on it later; some models have several, by name.
    key = template if isinstance(template, str | None) else repr(template)
    return _made(tokenizer, key, renderer, enable_thinking, thinking_retention)


# A workflow asks for it in each of thousands of episodes.
@lru_cache(maxsize=4)
def _loaded(
    path: str, renderer: str, enable_thinking: bool | None, thinking_retention: str
) -> ChatFormat:
    return load_chat_format(
        path,
        renderer=renderer,
        enable_thinking=enable_thinking,
        thinking_retention=thinking_retention,
    )


@lru_cache(maxsize=4)
def _made(
    tokenizer: Any,
    template: str | None,
    renderer: str,
    enable_thinking: bool | None,
    thinking_retention: str,
) -> ChatFormat:
    return chat_format_of(
        tokenizer,
        renderer=renderer,
        enable_thinking=enable_thinking,
        thinking_retention=thinking_retention,
    )
