"""Stop strings across the seam of an update, down to a character cut between its bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from any_agent.engine.resumed_stop_strings import ResumedStopMatcher
from any_agent.types import GenerationChunk


class Decoder:
    """One id per byte; remembers how many ids it was asked for, call by call."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, ids: Sequence[int]) -> str:
        self.asked.append(len(ids))
        return bytes(ids).decode("utf-8", "replace")


def chunk(ids: Sequence[int]) -> GenerationChunk:
    return GenerationChunk(list(ids), [-float(i) for i in ids], [3] * len(ids))


def cut(before: bytes, after: bytes, *stops: str, size: int = 100) -> tuple[bytes, str | None]:
    """What of ``after`` is left when it comes in chunks of ``size``, and what ended it."""
    matcher = ResumedStopMatcher(list(before), stops, Decoder())
    out = b""
    for start in range(0, len(after), size):
        whole = chunk(after[start : start + size])
        got = matcher.cut(whole)
        n = len(got.output_ids)
        assert got.output_ids == whole.output_ids[:n]
        assert got.logprobs == whole.logprobs[:n]
        assert got.versions == whole.versions[:n]
        out += bytes(got.output_ids)
        if got.stop_reason is not None:
            assert got.stop_reason == "stop" and isinstance(got.matched_stop, str)
            return out, got.matched_stop
        assert got is whole
    return out, None


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("stop", ["é", "é.", "€uro", "🙂", "🙂🙂", "aé", "ba€", "\n\n"])
def test_a_stop_string_that_the_seam_cuts_anywhere_is_found(stop: str, size: int) -> None:
    """Also between the bytes of its first character."""
    text = f"say b{stop}".encode()
    for seam in range(len(text) - len(stop.encode()) + 1, len(text)):
        before, after = text[:seam], text[seam:] + b" and more"
        assert cut(before, after, stop, size=size) == (text[seam:], stop), seam


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize(
    ("before", "after", "stop"),
    [
        ("stop here", " and on", "stop"),
        ("ends in stop", " and on", "stop"),
        ("before ", "stop here", "stop"),
        ("before ", "on and stop", "stop"),
        ("", "stop", "stop"),
        ("caf\u00e9", "\u00e9", "\u00e9"),
        ("sto", "rm and stop", "stop"),
    ],
    ids=[
        "inside the old",
        "at its end",
        "at the start",
        "inside the new",
        "nothing old",
        "é",
        "no",
    ],
)
def test_a_stop_string_within_one_side_of_the_seam_is_left_to_the_engine(
    before: str, after: str, stop: str, size: int
) -> None:
    assert cut(before.encode(), after.encode(), stop, size=size) == (after.encode(), None)


def test_of_several_stop_strings_the_one_across_the_seam_counts() -> None:
    assert cut(b"the EN", b"D and STOP", "STOP", "END") == (b"D", "END")
    # A broken byte that stays broken begins nothing.
    assert cut(b"ab\xc3", b"x then", "x") == (b"x then", None)
    assert cut(b"ab\xc3", b"\xa9x then", "x") == (b"\xa9x then", None)


def test_nothing_is_decoded_without_need() -> None:
    for before, stops in ((b"text", ()), (b"", ("stop",))):
        decode = Decoder()
        matcher = ResumedStopMatcher(list(before), stops, decode)
        matcher.cut(chunk(b"new text"))
        assert decode.asked == []
    decode = Decoder()
    matcher = ResumedStopMatcher(list(b"the EN"), ["END"], decode)
    assert matcher.cut(chunk(b"D")).matched_stop == "END"
    asked = len(decode.asked)
    whole = chunk(b"the END")
    assert matcher.cut(whole) is whole
    assert len(decode.asked) == asked, "it is done"


@pytest.mark.parametrize(
    "new", [b"x" * 5000, b"\x80" * 5000, "🙂".encode() * 1250], ids=["text", "broken", "wide"]
)
def test_decoding_is_bounded(new: bytes) -> None:
    """However long the outputs are, and also where no byte makes a character."""
    stop = "0123456789"
    decode = Decoder()
    matcher = ResumedStopMatcher(list(b"o" * 5000), [stop], decode)
    for k in range(0, len(new), 50):
        matcher.cut(chunk(new[k : k + 50]))
    window = 4 * (len(stop) + 1)
    assert len(decode.asked) <= window + 2
    assert max(decode.asked) <= 2 * window + 1
