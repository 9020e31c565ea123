"""What each grammar makes of outputs that are not as the family writes them, and of the two that
no miniature family has."""

from __future__ import annotations

import copy
import json
from functools import cache, partial
from typing import Any

import pytest

from any_agent.chat import ChatFormat, ParsedMessage
from tests.support.chat_streams import TOOLS, reading_as, streamed
from tests.support.families import family


@cache
def reader(renderer: str, *, as_text: bool) -> ChatFormat:
    """A reader over the Qwen3 miniature's vocabulary, with this family's markers in it or not."""
    chat = family("qwen3").chat
    made = reading_as(chat, renderer)
    if as_text or made.grammar is None:
        return made
    tokenizer = copy.deepcopy(chat.tokenizer)
    missing = [m for m in made.grammar.marks if m not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": missing}, False)
    return reading_as(chat, renderer, tokenizer)


def read(renderer: str, text: str, *, as_text: bool = False) -> ParsedMessage:
    made = reader(renderer, as_text=as_text)
    ids = made.tokenizer.encode(text, add_special_tokens=False)
    new_parser = partial(made.stream_parser, prompt_ids=[1], tools=TOOLS, stop=())
    one_by_one = streamed(new_parser(), [[i] for i in ids])
    assert streamed(new_parser(), [ids]) == one_by_one
    return one_by_one


def outline(message: ParsedMessage) -> tuple[str, list[tuple[str, str]]]:
    functions = [c["function"] for c in message.tool_calls]
    return message.content, [(f["name"], f["arguments"]) for f in functions]


KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"n": 1}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="add">\n<parameter name="text">a "b"\n c</parameter>\n'
    '<parameter name="n">1</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
    "</minimax:tool_call>"
)
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
CASES = [
    ("kimi-k2", f"So:\n{KIMI}", "So:", [("add", '{"n": 1}'), ("now", "{}")]),
    ("kimi-k2", f"So:\n{KIMI.partition('<|tool_call_end|>')[0]}", "So:", [("add", '{"n": 1}')]),
    ("kimi-k2", KIMI[:40], KIMI[:40], []),
    ("minimax-m2", f"So:\n{MINIMAX}", "So:", [("add", '{"text": "a \\"b\\"\\n c", "n": 1}'),
                                              ("now", "{}")]),
    ("minimax-m2", MINIMAX.partition(' "b"')[0], "", [("add", '{"text": "a')]),
    ("qwen3", "<tool_call><tool_call>{\"name\": \"add\"}</tool_call>", "<tool_call>",
     [("add", "{}")]),
    ("qwen3", '<tool_call>{"arguments": {"n": 1}, "name": "add"}</tool_call>', "",
     [("add", '{"n": 1}')]),
    ("qwen3", '<tool_call>{"name": "add", "arguments": "{\\"n\\": \\u0031, \\ud800}"}</tool_call>',
     "", [("add", '{"n": 1, \\ud800}')]),
    ("qwen3", '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}, "name": "b"}</tool_call>',
     "", [("add", '{"a": 1, "a": 2}')]),
    ("qwen3", '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "null")]),
    ("qwen3.5", "<tool_call>\n<function=add>\n<parameter=n>\nfive\n</parameter>\n</function>"
     "\n</tool_call>", "", [("add", '{"n": "five"}')]),
    ("qwen3.5", "<tool_call>\n<function=add>\n<parameter=text>\n  if x:\n    y\n\n</parameter>\n"
     "<parameter=free>\n[1, 2]\n</parameter>\n</tool_call>", "",
     [("add", '{"text": "  if x:\\n    y\\n", "free": [1, 2]}')]),
    ("qwen3.5", "<tool_call>\n<function=add>\n<parameter=text>\nhalf</tool_call>after", "after",
     [("add", '{"text": "half')]),
    ("qwen3.5", "<tool_call>\n<function=add>\n<parameter=n>\n4", "", [("add", '{"n": 4')]),
    ("qwen3.5", "<tool_call>add</tool_call>", "<tool_call>add</tool_call>", []),
    ("qwen3.5", "<tool_call><function=></tool_call>", "<tool_call><function=></tool_call>", []),
    ("qwen3.5", "<tool_call>\n<function=", "<tool_call>\n<function=", []),
    ("glm-4.5", "<tool_call>now</tool_call>", "", [("now", "{}")]),
    ("glm-4.5", "<tool_call>I will not</tool_call>", "<tool_call>I will not</tool_call>", []),
    ("glm-5", "<tool_call>add<arg_key>text</arg_key><arg_value>a\n</arg_value></tool_call> b",
     " b", [("add", '{"text": "a\\n"}')]),
    ("glm-5", "<tool_call>add<arg_key>n</arg_key><arg_value>12", "", [("add", '{"n": 12')]),
    ("glm-5", "<tool_call>ad", "<tool_call>ad", []),
    ("deepseek-v3", DEEPSEEK + 'add\n```json\n{"n": 1}\n```<｜tool▁call▁end｜>', "",
     [("add", '{"n": 1}')]),
    ("deepseek-v3", DEEPSEEK + 'add\n{"n": "```"}<｜tool▁calls▁end｜>x', "",
     [("add", '{"n": "```"}')]),
    ("deepseek-v3", DEEPSEEK + "add\n```json\nnot json\n```<｜tool▁call▁end｜>", "",
     [("add", "not json")]),
    ("deepseek-v3", DEEPSEEK + "now<｜tool▁call▁end｜>", "", [("now", "{}")]),
    ("deepseek-v3", "<｜tool▁calls▁begin｜> words", "<｜tool▁calls▁begin｜> words", []),
    ("llama-3", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama-3", '{"name": "now", "parameters": {}}', "", [("now", "{}")]),
    ("llama-3", '{"name": "add"}', "", [("add", "{}")]),
    ("llama-3", '{"name": "add", "parameters": {"n": 1}}; {"name": "add", "parameters": {}}', "",
     [("add", '{"n": 1}'), ("add", "{}")]),
    ("llama-3", '<|python_tag|>{"name": "add", "parameters": {"n": 1}}', "",
     [("add", '{"n": 1}')]),
    ("llama-3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama-3", 'See {"name": "add", "parameters": {}}', 'See {"name": "add", "parameters": {}}',
     []),
    ("gpt-oss", "no header", "no header", []),
    ("gpt-oss", "<|channel|>final<|end|>more", "<|channel|>finalmore", []),
    ("qwen3", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("gpt-oss", "<|channel|>commentary to=add <|message|>{}<|call|>", "", [("add", "{}")]),
    ("gpt-oss", "<|channel|>commentary to=browser.open <|message|>x<|end|>", "x", []),
    ("gpt-oss", "<|channel|>final", "<|channel|>final", []),
    ("gpt-oss", '<|channel|>commentary to=functions.add<|message|> {"n": ', "",
     [("add", '{"n":')]),
]  # fmt: skip


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(("renderer", "text", "content", "calls"), CASES)
def test_malformed_output_is_read_as_calls_or_stays_text(
    renderer: str, text: str, content: str, calls: list[tuple[str, str]], as_text: bool
) -> None:
    if as_text and renderer == "gpt-oss":
        return  # its header in the prompt is found by token
    assert outline(read(renderer, text, as_text=as_text)) == (content, calls)


def test_call_ids_depend_on_the_prompt_and_on_what_was_said_before() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    made = reader("qwen3", as_text=True)
    encode = family("qwen3").encode

    def ids_of(prompt: list[int], text: str) -> list[str]:
        parser = made.stream_parser(prompt_ids=prompt, tools=TOOLS, stop=())
        return [c["id"] for c in streamed(parser, [encode(text)]).tool_calls]

    assert ids_of([1], call + call) == ids_of([1], call + call)
    assert ids_of([1], call + call)[:1] == ids_of([1], call)
    every = [ids_of([1], call + call), ids_of([2], call), ids_of([1], "So: " + call)]
    assert len({i for ids in every for i in ids}) == 4


def test_kimi_and_minimax_are_read_as_their_renderers_read_them() -> None:
    from renderers.parsing import parse_kimi_k2, parse_minimax

    def ids(tokenizer: Any, *names: str) -> list[int]:
        return [tokenizer.convert_tokens_to_ids(n) for n in names]

    kimi = reader("kimi-k2", as_text=False).tokenizer  # type: ignore[attr-defined]
    marks = ids(
        kimi, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    )  # fmt: skip
    begin, end = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    text = "<think>why</think>So:" + KIMI.replace(begin + end, begin + "{}" + end)
    theirs = parse_kimi_k2(
        kimi, kimi.encode(text), stop_ids={2},
        tool_calls_section_begin_id=marks[0], tool_calls_section_end_id=marks[1],
        tool_call_begin_id=marks[2], tool_call_argument_begin_id=marks[3],
        tool_call_end_id=marks[4],
    )  # fmt: skip
    _agree(theirs, read("kimi-k2", text))
    minimax = reader("minimax-m2", as_text=False).tokenizer  # type: ignore[attr-defined]
    marks = ids(minimax, "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")
    text = "<think>why</think>So:" + MINIMAX
    theirs = parse_minimax(
        minimax, minimax.encode(text), stop_ids={2}, think_id=marks[0], think_end_id=marks[1],
        tool_call_id=marks[2], tool_call_end_id=marks[3], tools=TOOLS,
    )  # fmt: skip
    _agree(theirs, read("minimax-m2", text))


def _agree(theirs: Any, ours: ParsedMessage) -> None:
    assert (ours.content, ours.reasoning_content) == (theirs.content, theirs.reasoning_content)
    functions = [c["function"] for c in ours.tool_calls]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [
        (c.name, c.arguments) for c in theirs.tool_calls
    ]
    assert len(functions) == 2
