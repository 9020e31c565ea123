from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from any_agent.chat.output.markers import (
    TEXT,
    THINK_CLOSE,
    TOOL_OPEN,
    MarkerFinder,
    Piece,
    TextMarkers,
    TokenSpans,
)

MARKS = {"<a>": "open", "</a>": "close", "<ab>": "other"}
ALL = frozenset(MARKS.values())


def pieces(parts: list[str], wanted: frozenset[str] = ALL) -> list[Piece]:
    made, out = TextMarkers(MARKS), []
    for part in parts:
        made.add(part)
        while piece := made.next(wanted):
            out.append(piece)
    return [*out, (made.flush(), TEXT)]


def merged(parts: list[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for text, kind in parts:
        if kind == TEXT and out and out[-1][1] == TEXT:
            out[-1] = (out[-1][0] + text, TEXT)
        elif text:
            out.append((text, kind))
    return out


@given(st.lists(st.text(alphabet="</ab> x", max_size=4), max_size=12))
def test_markers_are_found_however_the_text_is_cut(parts: list[str]) -> None:
    text = "".join(parts)
    assert merged(pieces(parts)) == merged(pieces([text]))
    assert "".join(t for t, _ in pieces(parts)) == text


def test_only_what_may_begin_a_marker_is_held_back() -> None:
    made = TextMarkers(MARKS)
    made.add("x <y </")
    assert made.next(ALL) == ("x <y ", TEXT)
    assert made.next(ALL) is None
    made.add("b")
    assert made.next(ALL) == ("</b", TEXT)
    made.add("<a>z")
    assert [made.next(ALL), made.next(ALL), made.next(ALL)] == [("<a>", "open"), ("z", TEXT), None]


def test_markers_that_mean_nothing_now_are_text_and_the_longest_of_two_counts() -> None:
    assert pieces(["<a><"], frozenset()) == [("<a><", TEXT), ("", TEXT)]
    assert pieces(["<a></a>"], frozenset({"close"}))[:2] == [("<a>", TEXT), ("</a>", "close")]
    assert MarkerFinder(["<a", "<ab"]).find("x<abc") == (1, "<ab")


def test_the_tokens_of_reasoning_end_with_its_mark_or_before_a_call() -> None:
    spans = TokenSpans({7: ("</think>", THINK_CLOSE), 8: ("<tool_call>", TOOL_OPEN)})
    for ids, answered, count in (
        ([1, 2, 7, 3], True, 3),
        ([1, 2, 8, 3], True, 2),
        ([1, 2, 3], True, 0),
        ([1, 2, 3], False, 3),
    ):
        assert spans.reasoning(ids, reasoned=True, answered=answered) == count
    assert spans.reasoning([1, 7], reasoned=False, answered=True) == 0
