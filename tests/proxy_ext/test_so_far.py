"""What a stream keeps of itself for a client that comes later."""

from __future__ import annotations

import tracemalloc

import pytest

from any_agent.chat import MessageDelta
from any_agent.completions import Delta
from proxy_ext.calls.so_far import SoFar


def call_of(index: int, name: str) -> MessageDelta:
    function = {"name": name, "arguments": ""}
    return MessageDelta(
        tool_calls=[{"index": index, "id": f"c{index}", "type": "function", "function": function}]
    )


def arguments(index: int, text: str) -> MessageDelta:
    return MessageDelta(tool_calls=[{"index": index, "function": {"arguments": text}}])


@pytest.mark.parametrize("length", [0, 1, 40, 300])
def test_the_steps_are_one(length: int) -> None:
    """However many there are: what is put together in between changes nothing."""
    so_far = SoFar(2)
    assert so_far.empty
    steps = [MessageDelta(reasoning_content=f"r{k}") for k in range(length)]
    steps += [MessageDelta(f"t{k}") for k in range(length)]
    for index in range(2):
        steps += [call_of(index, f"f{index}"), *[arguments(index, f"{k},") for k in range(length)]]
    for k, step in enumerate(steps):
        so_far.add(Delta(step, [k], [-k / 4], [[(k, -k / 4), (1, -9.5)]], 2))
    delta = so_far.delta()
    numbers = "".join(f"{k}," for k in range(length))
    assert delta.message.content == ("".join(f"t{k}" for k in range(length)) or None)
    assert delta.message.reasoning_content == ("".join(f"r{k}" for k in range(length)) or None)
    assert delta.message.tool_calls == [
        {
            "index": index,
            "id": f"c{index}",
            "type": "function",
            "function": {"name": f"f{index}", "arguments": numbers},
        }
        for index in range(2)
    ]
    assert delta.index == 2
    assert delta.output_ids == list(range(len(steps)))
    assert delta.logprobs == [-k / 4 for k in range(len(steps))]
    assert delta.top_logprobs == [[(k, -k / 4), (1, -9.5)] for k in range(len(steps))]
    so_far.clear()
    assert so_far.empty
    assert so_far.delta() == Delta(MessageDelta(), [], [], None, 2)


def test_a_long_stream_is_kept_small() -> None:
    """Every stream of an SDK that marks its retries is kept, to its end."""
    so_far = SoFar(0)
    tracemalloc.start()
    try:
        for k in range(8192):
            top = [[(k + i, -i / 3) for i in range(5)]]
            so_far.add(Delta(MessageDelta(f"word{k} "), [k + 1000], [-k / 7], top, 0))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 9 of text, 12 of the token, 44 of the likeliest ones.
    assert kept < 8192 * 100
