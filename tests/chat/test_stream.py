"""The stream's law: whatever the tokens and the chunks, the deltas make up the parsed message."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from any_agent.chat import ChatFormat, ParsedMessage
from any_agent.chat.output.detokenizer import (
    WindowDetokenizer,
    _ByteDetokenizer,
    detokenizer_factory,
)
from any_agent.chat.output.markers import Markers
from tests.support.chat_streams import chunked, joined

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": "é"}}\n</tool_call>'
FRAGMENTS = (
    CALL,
    '<tool_call>{"name": "add", "arg',
    "<tool_call>nothing</tool_call>",
    '<tool_call>{"name": 3}</tool_call>',
    "<think>",
    "</think>",
    "\n\n",
    "  ",
    "hallo Welt, 你好 🦜",
    "END",
    "EN",
    "é",
    "<|im_start|>",
    "<",
)
VOCAB = 380


@st.composite
def outputs(draw: st.DrawFn) -> list[Any]:
    """Random ids (broken UTF-8, special tokens, ids outside the vocabulary) among fragments."""
    ids = st.lists(st.integers(0, VOCAB + 3), max_size=6)
    return draw(st.lists(st.one_of(ids, st.sampled_from(FRAGMENTS)), max_size=8))


def encoded(chat: ChatFormat, parts: list[Any]) -> list[int]:
    out: list[int] = []
    for p in parts:
        out += chat.tokenizer.encode(p, add_special_tokens=False) if isinstance(p, str) else p
    return out


@pytest.mark.parametrize("name", ["qwen3", "default", "buffered", "window", "text_marks"])
@settings(max_examples=120, deadline=None)
@given(
    parts=outputs(),
    sizes=st.lists(st.integers(0, 5), max_size=20),
    tools=st.booleans(),
    stop=st.sampled_from([(), ("END",), ("</tool_call>", "EN"), ("\n\n", "你好")]),
)
@example(parts=["<think>", "a", CALL], sizes=[], tools=True, stop=())
@example(parts=["<think>a", CALL, "b</think> c", CALL, "d"], sizes=[1], tools=True, stop=())
@pytest.mark.service
def test_deltas_concatenate_to_the_message(
    formats: dict[str, ChatFormat],
    name: str,
    parts: list[Any],
    sizes: list[int],
    tools: bool,
    stop: tuple[str, ...],
) -> None:
    chat = formats[name]
    ids = encoded(chat, parts)
    given_tools = TOOLS if tools else None
    parser = chat.stream_parser(prompt_ids=[1, 2, 3], tools=given_tools, stop=stop)
    deltas = [d for chunk in chunked(ids, sizes) for d in parser.feed(chunk)]
    rest, parsed = parser.finish()
    assert joined(deltas + rest) == parsed
    whole = chat.stream_parser(prompt_ids=[1, 2, 3], tools=given_tools, stop=stop)
    whole.feed(ids)
    assert whole.finish()[1] == parsed
    if not stop:
        assert chat.parse(ids, prompt_ids=[1, 2, 3], tools=given_tools) == parsed
    for call in parsed.tool_calls:
        assert re.fullmatch("call_[0-9a-f]{24}", call["id"])
        call["function"]["arguments"].encode()
    json.dumps(parsed.to_message(), ensure_ascii=False).encode()


def reading_as(chat: ChatFormat, family: str) -> ChatFormat:
    """The same format, whose outputs are read as another family's."""
    library, ends = chat._library_renderer, chat.stop_token_ids
    return ChatFormat(chat.tokenizer, library, ends, chat.renderer, name=family)


@pytest.fixture(scope="session")
def formats(qwen3: ChatFormat, default: ChatFormat) -> dict[str, ChatFormat]:
    buffered = reading_as(qwen3, "unknown")
    window, text_marks = copy.copy(qwen3), copy.copy(default)
    window.new_detokenizer = lambda: WindowDetokenizer(qwen3.decode)
    assert default.grammar is not None
    text_marks._markers = Markers({}, frozenset(default.stop_token_ids), default.grammar.marks)
    return {
        "qwen3": qwen3,
        "default": default,
        "buffered": buffered,
        "window": window,
        "text_marks": text_marks,
    }


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB + 3)), sizes=st.lists(st.integers(0, 5), max_size=20))
def test_byte_detokeniser_equals_the_whole_decode(
    qwen3: ChatFormat, ids: list[int], sizes: list[int]
) -> None:
    made = detokenizer_factory(qwen3.tokenizer, qwen3.decode)()
    assert isinstance(made, _ByteDetokenizer)
    assert "".join(made.push(c) for c in chunked(ids, sizes)) + made.flush() == qwen3.decode(ids)


@given(text=st.text(max_size=40))
def test_window_detokeniser_is_exact_on_valid_text(qwen3: ChatFormat, text: str) -> None:
    ids = qwen3.tokenizer.encode(text, add_special_tokens=False)
    made = WindowDetokenizer(qwen3.decode)
    assert "".join(made.push([i]) for i in ids) + made.flush() == text


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


@pytest.mark.parametrize("name", ["qwen3", "default", "buffered"])
def test_text_ends_before_the_stop_string(formats: dict[str, ChatFormat], name: str) -> None:
    chat = formats[name]
    ids = chat.tokenizer.encode("<think>why</think>first END second", add_special_tokens=False)
    parser = chat.stream_parser(prompt_ids=[], tools=None, stop=("END",))
    parser.feed(ids)
    assert parser.finish()[1] == ParsedMessage("first ", "why")


@pytest.mark.parametrize("name", ["qwen3", "default", "buffered"])
@pytest.mark.parametrize("text", ["    return a + b\n", "\tx", " x \n\n", "x"])
def test_white_space_at_an_answers_ends_stays(
    formats: dict[str, ChatFormat], name: str, text: str
) -> None:
    chat = formats[name]
    for thought, reasoning in (("", None), ("<think>why</think>\n\n", "why")):
        ids = chat.tokenizer.encode(f"{thought}{text}<|im_end|>", add_special_tokens=False)
        parsed = chat.parse(ids, prompt_ids=[], tools=None)
        assert parsed == ParsedMessage(text, reasoning)


def test_reasoning_calls_and_text(qwen3: ChatFormat) -> None:
    text = f"<think>\nwhy\n</think>\n\nLook:\n{CALL}\n{CALL}<|im_end|>"
    ids = qwen3.tokenizer.encode(text, add_special_tokens=False)
    parsed = qwen3.parse(ids, prompt_ids=[1], tools=TOOLS)
    assert (parsed.content, parsed.reasoning_content) == ("Look:", "why")
    names = [c["function"]["name"] for c in parsed.tool_calls]
    assert names == ["add", "add"]
    assert json.loads(parsed.tool_calls[0]["function"]["arguments"]) == {"b": 2, "a": "é"}
    assert parsed.tool_calls[0]["id"] != parsed.tool_calls[1]["id"]
    assert parsed.tool_calls[0]["id"] != qwen3.parse(ids, prompt_ids=[2], tools=TOOLS).tool_calls[0]
    assert parsed.to_message()["content"] == "Look:"


def test_a_request_without_tools_gets_no_calls(qwen3: ChatFormat) -> None:
    ids = qwen3.tokenizer.encode(CALL, add_special_tokens=False)
    assert qwen3.parse(ids, prompt_ids=[], tools=None) == ParsedMessage(CALL)


@pytest.mark.parametrize(
    "block",
    [
        '<tool_call>\n{"nam',
        "<tool_call>\n[1]\n</tool_call>",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "buffered", "text_marks"])
def test_what_names_no_tool_stays_in_the_content(
    formats: dict[str, ChatFormat], name: str, block: str
) -> None:
    chat = formats[name]
    ids = chat.tokenizer.encode(block, add_special_tokens=False)
    assert chat.parse(ids, prompt_ids=[], tools=TOOLS) == ParsedMessage(block)


@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        ('<tool_call>\n{"name": "add", "argum', ""),
        ('<tool_call>\n{"name": "add", "arguments": {"a": "b', '{"a": "b'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "[1]"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', '{"a": NaN}'),
        ('<tool_call>{"name": "add", "arguments": {"a": 1]}}</tool_call>', '{"a": 1]}}'),
        ('<tool_call>{"name": "add", arguments: {}}</tool_call>', "arguments: {}}"),
        ('<tool_call>{"name": "add"}</tool_call>', "{}"),
    ],
)
def test_what_named_a_tool_is_a_call(qwen3: ChatFormat, block: str, arguments: str) -> None:
    ids = qwen3.tokenizer.encode(block, add_special_tokens=False)
    (call,) = qwen3.parse(ids, prompt_ids=[], tools=TOOLS).tool_calls
    assert call["function"] == {"name": "add", "arguments": arguments}


@pytest.mark.parametrize(
    "text",
    ["4", " 4 \n", "<think>\na\n</think>\n\n4", "<think>\nunclosed", f"a {CALL}", CALL + CALL,
     f"<think>a{CALL}", f"<think>a{CALL}</think>b"],
)  # fmt: skip
def test_agrees_with_the_renderer_on_what_models_write(qwen3: ChatFormat, text: str) -> None:
    ids = qwen3.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
    theirs = qwen3._library_renderer.parse_response(ids)
    ours = qwen3.parse(ids, prompt_ids=[], tools=TOOLS)
    # Ours keeps the white space of an answer.
    assert ours.content.strip() == theirs.content
    assert (ours.reasoning_content or "") == (theirs.reasoning_content or "").strip()
    read = [(c["function"]["name"], c["function"]["arguments"]) for c in ours.tool_calls]
    assert [(n, json.loads(a)) for n, a in read] == [
        (c.name, c.arguments) for c in theirs.tool_calls
    ]


def test_a_prompt_that_opens_reasoning(qwen3: ChatFormat) -> None:
    prompt = qwen3.tokenizer.encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False)
    ids = qwen3.tokenizer.encode("why</think>yes", add_special_tokens=False)
    parsed = qwen3.parse(ids, prompt_ids=prompt, tools=None)
    assert (parsed.content, parsed.reasoning_content) == ("yes", "why")


def test_cost_per_token_does_not_grow(qwen3: ChatFormat) -> None:
    """Counted, not timed: the byte decoder never calls the tokenizer, the window a few ids."""
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return qwen3.decode(ids)

    made = WindowDetokenizer(decode)
    made.push([200] * 500 + list(range(100, 370)))
    assert max(lengths) <= 16


XML = (
    "\n<function=add>\n<parameter=code>\n  if x:\n    y\n</parameter>\n"
    "<parameter=n>\n3\n</parameter>\n<parameter=free>\nplain\n</parameter>\n</function>\n"
)


def test_xml_calls_agree_with_the_renderer(qwen3: ChatFormat) -> None:
    from renderers.parsing import parse_qwen35

    text = f"<think>\nwhy\n</think>\n\nSo: <tool_call>{XML.replace('  if', 'if')}</tool_call>"
    ids = qwen3.tokenizer.encode(text, add_special_tokens=False)
    names = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    think, think_end, call, call_end = qwen3.tokenizer.convert_tokens_to_ids(names)
    theirs = parse_qwen35(
        qwen3.tokenizer, ids, stop_ids={2}, think_id=think, think_end_id=think_end,
        tool_call_id=call, tool_call_end_id=call_end,
    )  # fmt: skip
    xml = reading_as(qwen3, "qwen3.5")
    ours = xml.parse(ids, prompt_ids=[], tools=TOOLS)
    assert (ours.content, ours.reasoning_content) == (theirs.content, theirs.reasoning_content)
    (read,) = ours.tool_calls
    assert json.loads(read["function"]["arguments"]) == theirs.tool_calls[0].arguments
