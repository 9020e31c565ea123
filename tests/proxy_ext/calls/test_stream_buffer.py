"""What a stream keeps of itself for a client that comes later."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from any_agent.chat import MessageDelta
from any_agent.completions.call_types import Delta
from proxy_ext.calls.stream_buffer import StreamBuffer


def call_of(index: int, name: str) -> MessageDelta:
    function = {"name": name, "arguments": ""}
    return MessageDelta(
        tool_calls=[{"index": index, "id": f"c{index}", "type": "function", "function": function}]
    )


def arguments(index: int, text: str) -> MessageDelta:
    return MessageDelta(tool_calls=[{"index": index, "function": {"arguments": text}}])


@pytest.mark.parametrize("length", [0, 1, 40, 300])
def test_the_steps_of_a_part_are_one(length: int) -> None:
    """However many there are: what is put together in between changes nothing."""
    so_far = StreamBuffer(2)
    assert not so_far.deltas()
    steps = [MessageDelta(reasoning_content=f"r{k}") for k in range(length)]
    steps += [MessageDelta(f"t{k}") for k in range(length)]
    for index in range(2):
        # What opens a call is no text.
        steps += [MessageDelta(), call_of(index, f"f{index}")]
        steps += [arguments(index, f"{k},") for k in range(length)]
    steps += [MessageDelta(f"u{k}") for k in range(length)] + [MessageDelta()]
    for k, step in enumerate(steps):
        so_far.add(Delta(step, [k], [-k / 4], [[(k, -k / 4), (1, -9.5)]], 2))
    told = []
    numbers = "".join(f"{k}," for k in range(length))
    if length:
        told.append(MessageDelta(reasoning_content="".join(f"r{k}" for k in range(length))))
        told.append(MessageDelta("".join(f"t{k}" for k in range(length))))
    for index in range(2):
        call: dict[str, Any] = {"index": index, "id": f"c{index}", "type": "function"}
        call["function"] = {"name": f"f{index}", "arguments": numbers}
        told.append(MessageDelta(tool_calls=[call]))
    if length:
        told.append(MessageDelta("".join(f"u{k}" for k in range(length))))
    told.append(MessageDelta())
    deltas = so_far.deltas()
    assert [delta.message for delta in deltas] == told
    counts = [length] * 2 if length else []
    counts += [length + 2] * 2 + ([length] if length else []) + [1]
    assert [len(delta.output_ids) for delta in deltas] == counts
    assert {delta.index for delta in deltas} == {2}
    ids = [id for delta in deltas for id in delta.output_ids]
    assert ids == list(range(len(steps)))
    assert [p for delta in deltas for p in delta.logprobs] == [-k / 4 for k in ids]
    top = [row for delta in deltas for row in delta.top_logprobs or ()]
    assert top == [[(k, -k / 4), (1, -9.5)] for k in ids]
    # Another client may come, also after more of the same part.
    assert so_far.deltas() == deltas
    so_far.add(Delta(MessageDelta("v"), [7], [-1.0], [[(7, -1.0)]], 2))
    more = so_far.deltas()
    if length:
        assert more[:-1] == deltas[:-2]
        assert more[-1].message.content == f"{told[-2].content}v"
        assert more[-1].output_ids == [*deltas[-2].output_ids, len(steps) - 1, 7]
    so_far.clear()
    assert so_far.deltas() == []


def test_a_long_stream_is_kept_small() -> None:
    """Every stream of an SDK that marks its retries is kept, to its end."""
    so_far = StreamBuffer(0)
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
