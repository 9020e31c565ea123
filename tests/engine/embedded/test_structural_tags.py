"""Structural tags, as the embedded engine reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from any_agent.engine.embedded.grammar import GrammarCompiler, lark_of
from any_agent.engine.embedded.model_loader import LoadedModel
from any_agent.errors import InvalidRequest
from tests.support.errors import fails_with

OBJECT = {"type": "json_schema", "json_schema": {"type": "object"}}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def row(*parts: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(parts)}


def tag(part: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": part}


def takes(loaded: LoadedModel, part: Any, *pieces: str | int) -> bool:
    """Whether an output is all of it; numbers are tokens."""
    state = GrammarCompiler(loaded).compile(json.dumps({"structural_tag": tag(part)}))
    for piece in pieces:
        core = loaded.tokenizer.backend_tokenizer
        for token in [piece] if isinstance(piece, int) else core.encode(piece).ids:
            if state.forbidden()[token]:
                return False
            state.push(token)
            assert state.error is None
    return not state.forbidden()[min(loaded.eos_ids)]


@pytest.mark.parametrize(
    ("part", "right", "wrong"),
    [
        (const('a "b"\n\\é'), 'a "b"\n\\é', "a"),
        ({"type": "regex", "pattern": r"a/b\/c\d+"}, "a/b/c12", "a/bc1"),
        (row({"type": "optional", "content": const("\n")}, const("x")), "\nx", "\n\nx"),
        ({"type": "or", "elements": [const("x"), OBJECT]}, '{"a": [1]}', "y"),
        (row(const("x"), {"type": "star", "content": const("yz")}, const("!")), "xyzyz!", "xy!"),
        (row({"type": "or", "elements": [const("a"), const("b")]}, const("c")), "bc", "a"),
        (
            {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>\n"},
            "<a>x\n< {</a>\n",
            "<a>x",
        ),
    ],
)
def test_each_part_takes_its_own_text_alone(
    loaded: LoadedModel, part: Any, right: str, wrong: str
) -> None:
    assert takes(loaded, part, right)
    assert not takes(loaded, part, wrong)


def test_tokens_are_told_from_their_names(loaded: LoadedModel) -> None:
    mark = loaded.tokenizer.get_vocab()["<tool_call>"]
    token = {"type": "token", "token": mark}
    part = row(token, const("x"))
    assert takes(loaded, part, mark, "x")
    assert not takes(loaded, const("<tool_call>x"), mark, "x")
    until = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": token}
    assert takes(loaded, row(until, const("y")), "any\ntext", mark, "y")
    assert not takes(loaded, row(until, const("y")), "any\ntext", mark, mark)


DEEP: Any = const("x")
for _ in range(5000):
    DEEP = row(DEEP)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "triggered_tags"},
        {"type": "token", "token": "x"},
        {"type": "tag", "begin": "a", "content": OBJECT, "end": "b"},
        {"type": "regex", "pattern": 7},
        7,
    ],
)
def test_unsupported_parts_of_a_structural_tag_are_refused(loaded: LoadedModel, part: Any) -> None:
    with fails_with(InvalidRequest, param="grammar"):
        GrammarCompiler(loaded).compile(json.dumps({"structural_tag": tag(part)}))


@pytest.mark.parametrize("pattern", ["(", "a\\", 'a/\nstart: "x"'])
def test_a_pattern_never_matches_outside_its_tag(loaded: LoadedModel, pattern: str) -> None:
    part = {"type": "regex", "pattern": pattern}
    try:
        assert not takes(loaded, part, "x")
    except InvalidRequest as error:
        assert error.param == "grammar"


def test_a_tag_that_is_too_deep_is_no_crash() -> None:
    with fails_with(ValueError, "deep"):
        lark_of(tag(DEEP))
    with pytest.raises(KeyError):
        lark_of({})
