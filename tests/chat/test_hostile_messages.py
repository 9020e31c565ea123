"""Whatever an agent sends as messages: an answer or a 400, from many threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from any_agent.errors import InvalidRequest
from tests.support.families import Family, family

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_a_call_that_was_cut_off_is_rendered(made: Family) -> None:
    """An agent sends back what it got: arguments that are no JSON, or no object."""
    if not made.spec.calls:
        return
    chat = made.chat
    user = {"role": "user", "content": "x"}
    for arguments in ('{"a": "unfin', "", "[1]", "5", "null", '"text"', '{"a": "\\ud83d"}'):
        call = {"id": "call00000", "function": {"name": "add", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "call00000", "content": "no"}
        ids = chat.render([user, said, result], TOOLS)
        assert "unfin" not in arguments or "unfin" in chat.decode(ids)
        output = made.encode("x") + list(chat.stop_token_ids[:1])
        assert chat.bridge(output, [result], TOOLS, answer=said) is not None


def test_deep_arguments_are_a_400() -> None:
    deep = "[" * 100_000
    call = {"id": "1", "function": {"name": "add", "arguments": f'{{"a": {deep}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert family("qwen3").chat.render([{"role": "user", "content": "x"}, said], TOOLS)
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    call["function"] = {"name": "add", "arguments": {"a": nested}}
    with pytest.raises(InvalidRequest):
        family("qwen3").chat.render([{"role": "user", "content": "x"}, said], TOOLS)


def test_many_threads_render_what_one_does() -> None:
    """Tokenizers keep state that their own encode sets, and templates are compiled once."""
    made = family("qwen3")
    chat = made.load()
    talks = [[{"role": "user", "content": f"né <|im_end|> {n} " * (n % 7 + 1)}] for n in range(40)]
    output = made.say("It is 3.")

    def both(talk: list[Any]) -> Any:
        variant = chat.variant({"enable_thinking": len(talk[0]["content"]) % 2 == 0})
        return variant.render(talk, TOOLS), variant.bridge(output, talk, None)

    alone = [both(talk) for talk in talks]
    chat = made.load()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(both, talks * 3, timeout=120)) == alone * 3
