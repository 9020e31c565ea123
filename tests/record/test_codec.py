from __future__ import annotations

import base64
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.record import (
    pack_interaction,
    pack_trajectories,
    unpack_interaction,
    unpack_trajectories,
)
from any_agent.record.codec import FIELDS
from any_agent.types import (
    Continuation,
    GenerationHyperparameters,
    Interaction,
    Trajectory,
    id_array,
    logprob_array,
)
from tests.support.errors import fails_with
from tests.support.records import Make

TEXT = st.text(st.characters(), max_size=8)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda c: st.lists(c, max_size=3) | st.dictionaries(TEXT, c, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
INT32 = st.integers(-(2**31), 2**31 - 1)
GCONFIG = st.builds(
    GenerationHyperparameters,
    max_new_tokens=st.integers(0, 2**40),
    temperature=FINITE,
    top_p=FINITE,
    top_k=st.integers(-1, 100),
    stop=st.lists(TEXT, max_size=2).map(tuple),
    stop_token_ids=st.lists(INT32, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    seed=st.none() | st.integers(0, 2**31 - 1),
    min_p=st.just(0.0) | FINITE,
    frequency_penalty=st.just(0.0) | FINITE,
    presence_penalty=st.just(0.0) | FINITE,
    repetition_penalty=st.just(1.0) | FINITE,
    logit_bias=st.lists(st.tuples(INT32, FINITE), max_size=2).map(tuple),
    grammar=st.none() | TEXT,
)


@st.composite
def interactions(draw: st.DrawFn) -> Interaction:
    tokens = draw(st.lists(st.tuples(INT32, st.floats(width=32), INT32), max_size=5))
    return Interaction(
        id=draw(TEXT),
        session_id=draw(TEXT),
        parent_id=draw(st.none() | TEXT),
        prompt_delta_ids=id_array(draw(st.lists(INT32, max_size=5))),
        output_ids=id_array([t for t, _, _ in tokens]),
        output_logprobs=logprob_array([p for _, p, _ in tokens]),
        output_versions=id_array([v for _, _, v in tokens]),
        message_delta=draw(st.lists(OBJECT, max_size=2)),
        output_message=draw(OBJECT),
        finish_reason=draw(TEXT),
        gconfig=draw(GCONFIG),
        model=draw(TEXT),
        tools=draw(st.none() | st.lists(OBJECT, max_size=2)),
        continuation=draw(st.sampled_from(Continuation)),
        branch_reason=draw(st.none() | TEXT),
        untrainable_reason=draw(st.none() | TEXT),
        reward=draw(st.none() | FINITE),
        request=draw(OBJECT),
        created_at=draw(FINITE),
    )


def same(a: Interaction, b: Interaction) -> bool:
    for f in fields(Interaction):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, np.ndarray):
            if x.dtype != y.dtype or x.tobytes() != y.tobytes() or not y.flags.writeable:
                return False
        elif x != y:
            return False
    return True


@settings(max_examples=100, deadline=None)
@given(i=interactions())
def test_a_packed_interaction_comes_back_unchanged(i: Interaction) -> None:
    packed = pack_interaction(i)
    assert same(i, unpack_interaction(packed))
    assert pack_interaction(unpack_interaction(packed)) == packed


@settings(max_examples=30, deadline=None)
@given(items=st.lists(interactions(), max_size=3), metadata=OBJECT, final=st.none() | FINITE)
def test_packed_trajectories_come_back_unchanged(
    items: list[Interaction], metadata: dict[str, Any], final: float | None
) -> None:
    named = {} if final is None else {"correct": final, "é": 2.0}
    sent = [
        Trajectory("s", "g", items, final, "t", metadata, named),
        Trajectory("s2", "s2", []),
    ]
    got = unpack_trajectories(pack_trajectories(sent))
    assert [(t.session_id, t.group_id, t.task_id, t.final_reward) for t in got] == [
        ("s", "g", "t", final),
        ("s2", "s2", None, None),
    ]
    assert got[0].metadata == metadata
    assert got[0].named_rewards == named
    assert all(same(a, b) for a, b in zip(items, got[0].interactions, strict=True))


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0), bit=st.integers(0, 7), cut=st.booleans())
def test_damaged_bytes_are_a_value_error(make: Make, at: int, bit: int, cut: bool) -> None:
    data = bytearray(pack_interaction(make("a", reward=1.0, tools=[{"type": "function"}])))
    at %= len(data)
    if cut:
        del data[at:]
    else:
        data[at] ^= 1 << bit
    try:
        unpack_interaction(bytes(data))
    except ValueError as e:
        assert str(e)


def runs(*versions: int) -> bytes:
    return np.array(versions, "<i4").tobytes()


WRONG: dict[str, list[Any]] = {
    "id": [5],
    "parent_id": [b"x"],
    "prompt_delta_ids": [b"123", [1, 2]],
    "output_versions": [
        *(b"1234", runs(2), runs(1, 7), runs(3, 7), runs(0, 7, 2, 8), runs(-1, 7, 3, 8)),
        *(runs(1, 7, 1, 7), runs(), runs(2**31 - 1, 1, 2**31 - 1, 2, 4, 3)),
    ],
    "output_logprobs": [b""],
    "message_delta": ["{}", "[5]"],
    "output_message": ["[]", "nonsense"],
    "tools": ["5"],
    "request": ["null", '{"role": 5}'],
    "reward": [True, float("nan")],
    "created_at": [float("inf")],
    "continuation": ["sideways", []],
    "gconfig": [{}],
    "finish_reason": [None],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_field_is_named(make: Make, field: str) -> None:
    plain = msgpack.unpackb(pack_interaction(make("a")))
    assert plain["interaction"][FIELDS.index("output_versions")] == runs(2, 7)
    for value in WRONG[field]:
        plain["interaction"][FIELDS.index(field)] = value
        with fails_with(ValueError, f"interaction.{field}"):
            unpack_interaction(msgpack.packb(plain))
    del plain["interaction"][FIELDS.index(field)]
    with fails_with(ValueError, "18 values", "19"):
        unpack_interaction(msgpack.packb(plain))


GOLDEN = """
gqZmb3JtYXQEq2ludGVyYWN0aW9u3AAToWKhc6FhpHN0b3CmZ3B0LTRvwNklc2FtcGxlZCBmcm9tIGEgdHJ1bmNhdGVk
IGRpc3RyaWJ1dGlvbss/4AAAAAAAAMs/+AAAAAAAAMQMAQAAAAIAAAADAAAAxAwHAAAACAAAAAkAAADEDAAAAL4AAIC+
AADAvsQQAgAAAAMAAAABAAAABAAAANkhW3sicm9sZSI6InVzZXIiLCJjb250ZW50Ijoiw6k/In1d2Sl7InJvbGUiOiJh
c3Npc3RhbnQiLCJjb250ZW50IjoiYW5zd2VyIGIifbVbeyJ0eXBlIjoiZnVuY3Rpb24ifV3ZInsib3ZlcnJpZGRlbiI6
eyJ0ZW1wZXJhdHVyZSI6MC4yfX2lZXhhY3SYQMs/5mZmZmZmZss/7MzMzMzMzQXDC5GheJEC
"""
"""An interaction as format 4 has it."""


def test_the_bytes_of_a_format_stay_what_they_are(make: Make) -> None:
    """Another layout needs another number."""
    expected = make(
        "b",
        "a",
        asked="é?",
        output=(7, 8, 9),
        output_versions=id_array([3, 3, 4]),
        tools=[{"type": "function"}],
        reward=0.5,
        request={"overridden": {"temperature": 0.2}},
        untrainable_reason="sampled from a truncated distribution",
        created_at=1.5,
        model="gpt-4o",
        gconfig=GenerationHyperparameters(64, 0.7, 0.9, 5, ("x",), (2,), True, 11),
    )
    written = base64.b64decode(GOLDEN)
    assert same(unpack_interaction(written), expected)
    assert pack_interaction(expected) == written


def test_wrong_sampling_settings_in_a_record_are_refused_by_name(make: Make) -> None:
    bent = GenerationHyperparameters(min_p=0.1, logit_bias=((5, -1.0),), grammar="{}")
    plain = msgpack.unpackb(pack_interaction(make("a", gconfig=bent)))
    right = list(plain["interaction"][-1])
    assert len(right) == 14
    biases: list[Any] = [{}, [5], [[1]], [[1.5, 1.0]], [[1, "x"]]]
    for at, value in [(8, "0"), (11, None), (13, 5), *((12, bias) for bias in biases)]:
        plain["interaction"][-1] = [*right[:at], value, *right[at + 1 :]]
        with fails_with(ValueError, "interaction.gconfig."):
            unpack_interaction(msgpack.packb(plain))


def test_unknown_fields_and_formats_are_refused(make: Make) -> None:
    plain = msgpack.unpackb(pack_interaction(make("a")))
    for wrong, names in (
        (plain | {"interaction": [*plain["interaction"], 1]}, ["20 values", "19"]),
        (plain | {"extra": 1}, ["'extra'"]),
        *((plain | {"format": number}, ["format: 4 is expected"]) for number in (1, 3, 5, None)),
    ):
        with fails_with(ValueError, *names):
            unpack_interaction(msgpack.packb(wrong))
    with fails_with(ValueError, "trajectories"):
        unpack_trajectories(pack_interaction(make("a")))
    body = msgpack.unpackb(pack_trajectories([Trajectory("s", "g", [make("a")])]))
    body["trajectories"][0]["interactions"][0][FIELDS.index("id")] = 1
    with fails_with(ValueError, "trajectories[0].interactions[0].id"):
        unpack_trajectories(msgpack.packb(body))
    body = msgpack.unpackb(pack_trajectories([Trajectory("s", "g", [])]))
    for named in ({"a": float("nan")}, {"a": True}, {b"a": 1.0}, {"a": "1"}, ["a"], None):
        body["trajectories"][0]["named_rewards"] = named
        with fails_with(ValueError, "trajectories[0].named_rewards"):
            unpack_trajectories(msgpack.packb(body))
    for data in (b"", b"\x80", b"\xc1", b"nonsense", msgpack.packb([1]), b"\x91" * 5000):
        with pytest.raises(ValueError):
            unpack_interaction(data)
