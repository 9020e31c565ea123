from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_agent.chat.output.json_stream import (
    StringReader,
    ValueScanner,
    as_arguments,
    is_json,
    quoted,
    read_string,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def cuts(text: str, sizes: list[int]) -> list[str]:
    out, at = [], 0
    for size in sizes:
        out.append(text[at : at + size])
        at += size
    return [*out, text[at:]]


SIZES = st.lists(st.integers(0, 4), max_size=20)


@given(value=VALUES, after=st.sampled_from([",", "}", "]", " ", "\n}"]), sizes=SIZES)
def test_a_value_ends_where_its_json_does(value: object, after: str, sizes: list[int]) -> None:
    text = json.dumps(value)
    scanner, read = ValueScanner(), ""
    for part in cuts(text + after, sizes):
        end = scanner.feed(part)
        read += part if end < 0 else part[:end]
        if end >= 0:
            break
    assert read == text


@pytest.mark.parametrize("text", ['{"a": 1]', "[1}", '[{"a": "]"}}'])
def test_brackets_that_do_not_match_are_told(text: str) -> None:
    scanner = ValueScanner()
    assert scanner.feed(text) == -1
    assert scanner.broken_at == len(text) - 1


@given(text=st.text(), ascii=st.booleans(), sizes=SIZES)
def test_a_string_says_what_json_says(text: str, ascii: bool, sizes: list[int]) -> None:
    inner = json.dumps(text, ensure_ascii=ascii)[1:-1]
    reader = StringReader()
    assert "".join(map(reader.push, cuts(inner, sizes))) + reader.flush() == text


@given(text=st.text(alphabet='\\ud83c0"nx/ é'), sizes=SIZES)
def test_what_is_no_escape_stays_and_nothing_is_held_for_long(text: str, sizes: list[int]) -> None:
    reader = StringReader()
    out = "".join(map(reader.push, cuts(text, sizes))) + reader.flush()
    whole = StringReader()
    assert whole.push(text) + whole.flush() == out
    out.encode()


@pytest.mark.parametrize("escape", ["\\ud800", "\\udc00 x", "\\ud83d\\n"])
def test_a_lone_surrogate_stays_escaped(escape: str) -> None:
    reader = StringReader()
    said = reader.push(escape) + reader.flush()
    assert said.startswith(escape[:6])


def test_strings_and_values_are_read_strictly() -> None:
    assert [read_string(s) for s in ("a\\n\\u00e9", "a\nb", "\\ud800")] == ["a\né", None, None]
    assert is_json('{"a": [1, 2.5e3, null]}') and quoted('é"\n') == '"é\\"\\n"'
    for text in ("NaN", "{a: 1}", "", "1 2", "[" * 100_000, '"\\ud800'):
        assert not is_json(text)


def test_arguments_that_are_no_json_object_are_kept_as_text_or_refused() -> None:
    assert as_arguments({"a": "é"}) == '{"a": "é"}'
    assert as_arguments({"a": "\ud800"}) == '{"a": "\\ud800"}'
    assert as_arguments("not json") == "not json"
    for wrong in ([1], {"a": float("nan")}, "\ud800"):
        assert as_arguments(wrong) is None
