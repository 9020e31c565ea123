"""The likeliest tokens of a whole output, packed."""

from __future__ import annotations

import json

from any_agent.completions.logprobs import PackedTopLogprobs, TopLogprobs, unpack_top_logprobs

ROWS: TopLogprobs = [[(3, -0.5), (151_000, -1.25)], [], [(0, -17.5)]]


def test_packed_likeliest_tokens_come_back_unchanged() -> None:
    packed = PackedTopLogprobs()
    packed.extend(ROWS[:1])
    packed.extend(ROWS[1:])
    assert len(packed) == 3
    assert packed.rows() == ROWS
    assert unpack_top_logprobs(json.loads(json.dumps(packed.to_json()))) == ROWS
    nothing = PackedTopLogprobs()
    assert not len(nothing)
    assert nothing.rows() == unpack_top_logprobs(nothing.to_json()) == []
