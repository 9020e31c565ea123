from __future__ import annotations

import copy

from any_agent.chat.output.message import MessageDelta, merge_deltas

OPENING = {"index": 0, "id": "call_1", "type": "function"}


def step(index: int, arguments: str) -> MessageDelta:
    return MessageDelta(tool_calls=[{"index": index, "function": {"arguments": arguments}}])


def opening(index: int, name: str) -> MessageDelta:
    function = {"name": name, "arguments": ""}
    return MessageDelta(tool_calls=[{**OPENING, "index": index, "function": function}])


def test_deltas_merge_into_one() -> None:
    deltas = [
        MessageDelta(reasoning_content="wh"),
        MessageDelta(reasoning_content="y"),
        MessageDelta(content="a"),
        opening(0, "add"),
        step(0, '{"a"'),
        step(0, ": 1}"),
        MessageDelta(content="b"),
        opening(1, "now"),
    ]
    before = copy.deepcopy(deltas)
    merged = merge_deltas(deltas)
    assert deltas == before
    assert (merged.content, merged.reasoning_content) == ("ab", "why")
    assert merged.tool_calls == [
        {**OPENING, "function": {"name": "add", "arguments": '{"a": 1}'}},
        {**OPENING, "index": 1, "function": {"name": "now", "arguments": ""}},
    ]
    assert merge_deltas([merged]) == merged
    amid_a_call = merge_deltas([step(0, "{"), step(0, "}")])
    assert amid_a_call.tool_calls == [{"index": 0, "function": {"arguments": "{}"}}]
    assert merge_deltas([]) == MessageDelta()
