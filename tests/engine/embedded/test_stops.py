from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from any_agent.chat.output.detokenizer import WindowDetokenizer
from any_agent.engine.base import agenerate
from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.engine.embedded.generate_schema import AnswerWriter, parse_generate
from any_agent.engine.embedded.model_loader import LoadedModel
from any_agent.engine.embedded.request import EngineRequest, FinishReason
from any_agent.engine.embedded.stops import (
    StopMatcher,
    doubtful_end,
    first_stop,
)
from any_agent.engine.embedded.variant import Variant
from tests.support.engine.embedded import prompt, request


def utf8(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


text = st.text(alphabet="abé€😀 ", max_size=24)
LATE = [0xFF] * 7 + list("€".encode())
"""A character that begins where so many bytes have come that the text waits no longer."""
broken = st.lists(st.sampled_from([*"aé€😀".encode(), 0xFF]), max_size=40)


@given(text)
def test_incremental_text_is_the_whole_text(whole: str) -> None:
    decoder = WindowDetokenizer(utf8)
    pieces = [decoder.push([byte]) for byte in whole.encode()]
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces)


@given(broken)
@example(LATE)
@example([0xFF] * 15 + LATE[7:])
def test_incremental_text_of_any_bytes_is_the_whole_text(data: list[int]) -> None:
    decoder = WindowDetokenizer(utf8)
    assert "".join(decoder.push([byte]) for byte in data) + decoder.flush() == utf8(data)


@given(broken, st.booleans())
@example([*LATE, ord("a"), 0xE2], True)
def test_a_streams_texts_are_the_whole_answers(data: list[int], incremental: bool) -> None:
    call = parse_generate({"input_ids": [1]})
    inner = EngineRequest(
        "r", Variant("0"), [1], call.request.gconfig, frozenset(), output_ids=data
    )
    inner.changes.append((0, "3"))

    def writer() -> AnswerWriter:
        return AnswerWriter(call, inner, utf8, version=lambda: "3", started=0.0)

    end, stream, shown = FinishReason("length"), writer(), ""
    for n in range(len(data) + 1):
        event = stream.event(n, end if n == len(data) else None, incremental=incremental)
        shown = shown + event["text"] if incremental else event["text"]
        assert utf8(data).startswith(shown)
    assert shown == writer().whole(end)["text"] == utf8(data)


def test_bytes_that_never_make_a_character_hold_neither_a_stop_nor_text_back() -> None:
    matcher = StopMatcher(["€"], utf8)
    assert [matcher.push(byte) for byte in LATE] == [None] * 9 + ["€"]
    decoder = WindowDetokenizer(utf8)
    assert "\ufffd" in "".join(decoder.push([0xFF]) for _ in range(40))
    assert decoder.push([ord("a")]).endswith("a")


@given(text, st.lists(st.text(alphabet="abé€😀 ", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_is_found_at_the_token_that_completes_it(whole: str, stops: list[str]) -> None:
    matcher, data = StopMatcher(stops, utf8), whole.encode()
    found = next(((n, m) for n, b in enumerate(data, 1) if (m := matcher.push(b))), None)
    expected = None
    for n in range(1, len(data) + 1):
        complete = data[:n].decode("utf-8", errors="ignore")
        if any(stop in complete for stop in stops):
            expected = n, first_stop(complete, stops)
            break
    assert found == expected


@given(text, st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_doubtful_end_is_the_longest_possible_beginning(whole: str, stops: list[str]) -> None:
    begins = [n for n in range(1, len(whole) + 1) if any(s.startswith(whole[-n:]) for s in stops)]
    assert doubtful_end(whole, stops) == max(begins, default=0)


def test_of_two_stops_the_first_to_end_wins() -> None:
    assert first_stop("xabcd", ["abcd", "bc"]) == "bc"
    assert first_stop("xabc", ["bc", "abc"]) == "abc"
    assert first_stop("x", ["abc"]) is None


@pytest.mark.parametrize("ignore", [False, True])
async def test_the_end_of_text_token_ends_an_answer_unless_ignored(
    loaded: LoadedModel, ignore: bool
) -> None:
    asked = request("r", prompt(7), temperature=0, max_new_tokens=24, ignore_eos=ignore)
    async with EmbeddedEngine(loaded) as engine:
        free = await agenerate(engine, replace(asked, gconfig=asked.gconfig.new(ignore_eos=True)))
    token = free.output_ids[4]
    async with EmbeddedEngine(replace(loaded, eos_ids=frozenset({token}))) as engine:
        answer = await agenerate(engine, asked)
    if ignore:
        assert (answer.output_ids, answer.stop_reason) == (free.output_ids, "length")
    else:
        assert answer.output_ids == free.output_ids[: free.output_ids.index(token) + 1]
        assert (answer.stop_reason, answer.matched_stop) == ("stop", token)
