from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.chat import chain_keys, normalise

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=5), c, max_size=3),
    max_leaves=8,
)
FIELDS = ("role", "content", "name", "tool_calls", "reasoning_content", "type", "text", "function")
SHAPED = st.dictionaries(st.sampled_from(FIELDS), JSON | st.lists(
    st.dictionaries(st.sampled_from((*FIELDS, "arguments")), JSON, max_size=3), max_size=2
))  # fmt: skip


@settings(max_examples=300)
@given(messages=st.lists(JSON | SHAPED, max_size=4), tools=st.none() | st.lists(JSON, max_size=2),
       cut=st.integers(0, 4))  # fmt: skip
def test_any_json_value_has_a_key(messages: list[Any], tools: Any, cut: int) -> None:
    keys = chain_keys(messages, tools)
    assert len(keys) == len(messages) and all(len(k) == 32 for k in keys)
    assert keys == chain_keys(json.loads(json.dumps(messages)), tools)
    if keys and 0 < cut <= len(messages):
        head = chain_keys(messages[:cut], tools)
        assert head + chain_keys(messages[cut:], tools, start=head[-1]) == keys


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    entry = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [entry | more]}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"role": "user", "content": "ab"}, {"content": "ab", "role": "user", "name": None}),
        (
            {"role": "user", "content": "ab"},
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
        ),
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        (call('{"a": 1, "b": 2}'), call('{"b":2,"a":1}', id="other", index=0)),
        (call('{"a": 1}'), call({"a": 1})),
        (call("{}"), call("{}") | {"content": "", "refusal": None, "audio": None}),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "why"},
            {"role": "assistant", "content": "x", "tool_calls": [], "annotations": []},
        ),
        (
            {"role": "tool", "content": "x", "tool_call_id": "a"},
            {"role": "tool", "content": "x", "tool_call_id": "b"},
        ),
    ],
)
def test_the_same_conversation(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert normalise(a) == normalise(b)
    assert chain_keys([a], None) == chain_keys([b], [])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"role": "user", "content": "ab"}, {"role": "user", "content": "ab "}),
        ({"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": "n"}),
        ({"role": "user", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "user", "content": "1"}, {"role": "user", "content": 1}),
        (call('{"a": 1}'), call('{"a": 2}')),
        (call('{"a": 1}'), call('{"a": 1')),
        (call('"x"'), call("x")),
        (call("{}"), call("{}") | {"content": "x"}),
        ("\ud800", "?"),
        (10**5000, 10**5000 + 1),
    ],
    ids=range(10),
)
def test_another_conversation(a: Any, b: Any) -> None:
    assert chain_keys([a], None) != chain_keys([b], None)


def test_tools_and_order_count() -> None:
    a, b = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    assert chain_keys([a, b], None)[-1] != chain_keys([b, a], None)[-1]
    assert chain_keys([a], None) != chain_keys([a], [{"type": "function"}])
    assert chain_keys([], None) == []


def test_deep_nesting() -> None:
    deep: Any = "x"
    for _ in range(50_000):
        deep = [deep]
    other: Any = "y"
    for _ in range(50_000):
        other = {"k": other}
    keys = {chain_keys([{"role": "user", "content": v}], None)[0] for v in (deep, other, [deep])}
    assert len(keys) == 3
