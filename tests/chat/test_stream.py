"""The stream's law: whatever the tokens and the chunks, the deltas make up the parsed message."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.chat import ChatFormat, ParsedMessage
from any_agent.chat.output.detokenizer import WindowDetokenizer, detokenizer_factory
from tests.support.chat_streams import chunked, joined, reading_as

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": "é"}}\n</tool_call>'
VOCAB = 380


@pytest.fixture(scope="module")
def formats(qwen3: ChatFormat, default: ChatFormat) -> list[ChatFormat]:
    """Three readers of the same family; the last one reads when all is there."""
    return [qwen3, default, reading_as(qwen3, "unknown")]


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB + 3)), sizes=st.lists(st.integers(0, 5), max_size=20))
def test_byte_detokeniser_equals_the_whole_decode(
    qwen3: ChatFormat, ids: list[int], sizes: list[int]
) -> None:
    made = detokenizer_factory(qwen3.tokenizer, qwen3.decode)()
    assert not isinstance(made, WindowDetokenizer)
    assert "".join(made.push(c) for c in chunked(ids, sizes)) + made.flush() == qwen3.decode(ids)


def test_nothing_certain_is_held_back(qwen3: ChatFormat) -> None:
    ids = qwen3.tokenizer.encode("Hi é, this is 1 digit.", add_special_tokens=False)
    parser = qwen3.stream_parser(prompt_ids=[], tools=TOOLS, stop=("END",))
    seen = ""
    for n, i in enumerate(ids, 1):
        seen += joined(parser.feed([i])).content
        assert seen == qwen3.decode(ids[:n]).rstrip("�").rstrip()


def test_the_beginning_of_a_stop_string_is_held_back(qwen3: ChatFormat) -> None:
    parser = qwen3.stream_parser(prompt_ids=[], tools=None, stop=("END",))
    e, n, d = (qwen3.tokenizer.encode(c, add_special_tokens=False) for c in "END")
    assert joined(parser.feed(e + n)).content == ""
    assert joined(parser.feed(e)).content == "EN"
    assert joined(parser.feed(n + d)).content == ""
    assert parser.feed(d) == []
    assert parser.finish() == ([], ParsedMessage("EN"))


def test_text_ends_before_the_stop_string(formats: list[ChatFormat]) -> None:
    for chat in formats:
        ids = chat.tokenizer.encode("<think>why</think>first END second", add_special_tokens=False)
        parser = chat.stream_parser(prompt_ids=[], tools=None, stop=("END",))
        parser.feed(ids)
        assert parser.finish()[1] == ParsedMessage("first ", "why")


def test_a_request_without_tools_gets_no_calls(qwen3: ChatFormat) -> None:
    ids = qwen3.tokenizer.encode(CALL, add_special_tokens=False)
    assert qwen3.parse(ids, prompt_ids=[], tools=None) == ParsedMessage(CALL)


def test_what_names_no_tool_stays_in_the_content(formats: list[ChatFormat]) -> None:
    blocks = (
        " x \n",
        '<tool_call>\n{"nam',
        "<tool_call>\n[1]\n</tool_call>",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    )
    for chat, block in itertools.product(formats, blocks):
        ids = chat.tokenizer.encode(block, add_special_tokens=False)
        assert chat.parse(ids, prompt_ids=[], tools=TOOLS) == ParsedMessage(block)


def test_what_named_a_tool_is_a_call(qwen3: ChatFormat) -> None:
    for said, arguments in (
        ('\n{"name": "add", "argum', ""),
        ('\n{"name": "add", "arguments": {"a": "b', '{"a": "b'),
        ('{"name": "add", "arguments": [1]}</tool_call>', "[1]"),
        ('{"name": "add", "arguments": {"a": NaN}}</tool_call>', '{"a": NaN}'),
        ('{"name": "add", "arguments": {"a": 1]}}</tool_call>', '{"a": 1]}}'),
        ('{"name": "add", arguments: {}}</tool_call>', "arguments: {}}"),
        ('{"name": "add"}</tool_call>', "{}"),
    ):
        ids = qwen3.tokenizer.encode(f"<tool_call>{said}", add_special_tokens=False)
        (call,) = qwen3.parse(ids, prompt_ids=[], tools=TOOLS).tool_calls
        assert call["function"] == {"name": "add", "arguments": arguments}


@pytest.mark.parametrize(
    "text",
    ["4", " 4 \n", "<think>\na\n</think>\n\n4", "<think>\nunclosed", f"a {CALL}", CALL + CALL,
     f"<think>a{CALL}", f"<think>a{CALL}</think>b"],
)  # fmt: skip
def test_agrees_with_the_renderer_on_what_models_write(qwen3: ChatFormat, text: str) -> None:
    ids = qwen3.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
    theirs = qwen3.library_renderer.parse_response(ids)
    ours = qwen3.parse(ids, prompt_ids=[], tools=TOOLS)
    # Ours keeps the white space of an answer.
    assert ours.content.strip() == theirs.content
    assert (ours.reasoning_content or "") == (theirs.reasoning_content or "").strip()
    read = [(c["function"]["name"], c["function"]["arguments"]) for c in ours.tool_calls]
    assert [(n, json.loads(a)) for n, a in read] == [
        (c.name, c.arguments) for c in theirs.tool_calls
    ]
