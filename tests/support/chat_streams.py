"""What the tests of parsers share: streams put together again, ids cut into chunks."""

from __future__ import annotations

import copy
from typing import Any

from any_agent.chat import ChatFormat, MessageDelta, ParsedMessage, StreamParser

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]


def reading_as(chat: ChatFormat, family: str, tokenizer: Any = None) -> ChatFormat:
    """The same format, whose outputs are read as another family's."""
    library, ends = chat.library_renderer, chat.stop_token_ids
    return ChatFormat(tokenizer or chat.tokenizer, library, ends, chat.renderer, name=family)


def joined(deltas: list[MessageDelta]) -> ParsedMessage:
    """What a client makes of a stream."""
    calls: list[dict[str, Any]] = []
    for d in deltas:
        fields = (d.content, d.reasoning_content, d.tool_calls)
        assert sum(f is not None for f in fields) == 1
        for call in d.tool_calls or []:
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["function"]["arguments"] == ""
                calls.append(copy.deepcopy({k: v for k, v in call.items() if k != "index"}))
            else:
                assert call["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return ParsedMessage(
        "".join(d.content or "" for d in deltas),
        "".join(d.reasoning_content or "" for d in deltas) or None,
        calls,
    )


def chunked(ids: list[int], sizes: list[int]) -> list[list[int]]:
    out, at = [], 0
    for size in sizes:
        out.append(ids[at : at + size])
        at += size
    return [*out, ids[at:]]


def streamed(parser: StreamParser, chunks: list[list[int]]) -> ParsedMessage:
    """The message of a stream whose deltas are proven to make it up."""
    deltas: list[MessageDelta] = []
    step: list[MessageDelta] = []
    for chunk in chunks:
        step = parser.feed(chunk)
        deltas += step
    rest, message = parser.finish()
    step += rest  # as a caller may: what it was given is its own
    assert joined(deltas + rest) == message
    return message
