"""What a stream keeps of itself for a client that comes later."""

from __future__ import annotations

import tracemalloc

import pytest

from any_agent.chat import MessageDelta, merge_deltas
from any_agent.completions.call_types import Delta
from proxy_ext.calls.stream_buffer import StreamBuffer


def steps_of(length: int) -> list[list[MessageDelta]]:
    """The parts of an answer, each in so many steps: thought, text, two calls, text."""

    def call(index: int) -> list[MessageDelta]:
        function = {"name": f"f{index}", "arguments": ""}
        opened = {"index": index, "id": f"c{index}", "type": "function", "function": function}
        texts = [{"index": index, "function": {"arguments": f"{k},"}} for k in range(length)]
        return [MessageDelta(tool_calls=[one]) for one in (opened, *texts)]

    thought = [MessageDelta(reasoning_content=f"r{k}") for k in range(length)]
    text, rest = ([MessageDelta(f"{name}{k}") for k in range(length)] for name in "tu")
    return [part for part in (thought, text, call(0), call(1), rest) if part]


@pytest.mark.parametrize("length", [0, 1, 40, 300])
def test_buffered_steps_of_one_part_are_merged(length: int) -> None:
    """However many there are: what is put together in between changes nothing."""
    so_far, parts = StreamBuffer(2), steps_of(length)
    assert not so_far.deltas()
    # The last token has no text.
    steps = [step for part in parts for step in part] + [MessageDelta()]
    for k, step in enumerate(steps):
        so_far.add(Delta(step, [k], [-k / 4], [[(k, -k / 4), (1, -9.5)]], 2))
    *deltas, last = so_far.deltas()
    assert [delta.message for delta in deltas] == [merge_deltas(part) for part in parts]
    assert last.output_ids == [len(steps) - 1]
    assert [len(delta.output_ids) for delta in deltas] == [len(part) for part in parts]
    ids = [id for delta in [*deltas, last] for id in delta.output_ids]
    assert ids == list(range(len(steps)))
    assert [p for d in [*deltas, last] for p in d.logprobs] == [-k / 4 for k in ids]
    top = [row for delta in [*deltas, last] for row in delta.top_logprobs or ()]
    assert top == [[(k, -k / 4), (1, -9.5)] for k in ids]
    assert {delta.index for delta in deltas} == {2}
    # Another client may come, also after more of the same part.
    assert so_far.deltas() == [*deltas, last]
    if length:
        so_far.add(Delta(MessageDelta("v"), [7], [-1.0], [[(7, -1.0)]], 2))
        *same, more = so_far.deltas()
        assert same == deltas[:-1]
        assert more.message.content == f"{deltas[-1].message.content}v"
        assert more.output_ids == [*deltas[-1].output_ids, len(steps) - 1, 7]
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
