from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from any_agent.chat.output.markers import TEXT, Piece
from any_agent.chat.output.stop_strings import StopFilter

LETTERS = st.text(alphabet="aab", max_size=5)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=3)


def text_of(pieces: list[Piece]) -> str:
    return "".join(text for text, _ in pieces)


@given(stops=STOPS, tokens=st.lists(LETTERS, max_size=20))
def test_text_before_the_first_stop_string_leaves_as_soon_as_it_can(
    stops: list[str], tokens: list[str]
) -> None:
    made, out, text = StopFilter(tuple(stops)), "", ""
    for token in tokens:
        out += text_of(made.push([(token, TEXT)]))
        text += token
        found = [at for s in stops if (at := text.find(s)) >= 0]
        assert made.matched == bool(found)
        if found:
            assert out == text[: min(found)]
            assert made.push([("more", TEXT)]) == []
            return
        doubtful = max(n for s in stops for n in range(len(s)) if n == 0 or text.endswith(s[:n]))
        assert out == text[: len(text) - doubtful]
    assert out + text_of(made.finish()) == text


def test_a_marker_leaves_whole_or_is_cut_as_text() -> None:
    made = StopFilter(("call>x", "zz"))
    assert made.push([("a", TEXT), ("<call>", "mark")]) == [("a", TEXT)]
    assert made.push([("y", TEXT)]) == [("<call>", "mark"), ("y", TEXT)]
    made.push([("<call>", "mark")])
    assert made.push([("x", TEXT)]) == [("<", TEXT)]
    assert made.matched
    without = StopFilter(("",))
    pieces = [("a", TEXT)]
    assert not without.active and without.push(pieces) is pieces
