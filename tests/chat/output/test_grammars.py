"""Every family's outputs: whatever the tokens and the chunks, the stream makes up the message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.engine.embedded.stops import StopMatcher
from tests.support.chat_streams import TOOLS, chunked, joined, streamed
from tests.support.families import Answer, Call, Family, family, names

EVERY = pytest.mark.parametrize("name", names())
SOUP = (
    "<think>", "</think>", "add", "no_such_tool", "hallo 你好 🦜", "\n", "\n\n", " ", "<", "```",
    '{"name": "add", "arguments": {"text": "a\\"b", "n": 1}}', '{"name": "add", "parameters": ',
    '{"name": ', '"add"', ', "arguments": ', '{"text": "', '\\ud83d\\ude00', '\\ud800', "\\", '"',
    "}", "]", "{", ";", ":", "function", "```json\n", "\n```", "NaN", "functions.add", ":0",
    "<function=add>", "<parameter=text>", "<parameter=n>", "</parameter>", "</function>",
    "<parameter=", "<function=", "commentary to=functions.add ", "analysis", "final", "json",
    "assistant", '<invoke name="add">', "END", "EN",
)  # fmt: skip
STOPS = [(), ("END",), ("\n\n", "你好"), ('"}', "</tool_call>", "<|message|>"), ("add", "EN")]


def soup(made: Family) -> st.SearchStrategy[list[int]]:
    """Pieces of calls in any order, markers, whole calls, broken bytes, ids that are none."""
    marks = tuple(made.chat.grammar.marks)
    parts: list[st.SearchStrategy[list[int]]] = [
        st.sampled_from(SOUP + marks).map(made.encode),
        st.lists(st.integers(0, made.chat.vocab_size + 3), max_size=4),
    ]
    if made.spec.calls:
        call = made.say("Look", calls=(Call("add", {"text": 'a\n"é"', "n": 3}),))
        parts.append(st.integers(1, len(call)).map(lambda k: call[:k]))
    return st.lists(st.one_of(parts), max_size=10).map(lambda all: [i for p in all for i in p])


def parser_of(made: Family, tools: Any = TOOLS, stop: tuple[str, ...] = ()) -> Any:
    prompt = made.chat.render([{"role": "user", "content": "hi"}], tools)
    return made.chat.stream_parser(prompt_ids=prompt, tools=tools, stop=stop)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
@pytest.mark.service
def test_no_output_breaks_a_stream(made: Family, data: st.DataObject) -> None:
    ids = data.draw(soup(made))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=20))
    stop = data.draw(st.sampled_from(STOPS))
    tools = data.draw(st.sampled_from([None, TOOLS]))
    message = streamed(parser_of(made, tools, stop), chunked(ids, sizes))
    assert streamed(parser_of(made, tools, stop), [[i] for i in ids]) == message
    assert streamed(parser_of(made, tools, stop), [ids]) == message
    json.dumps(message.to_message(), ensure_ascii=False).encode()
    assert tools or not message.tool_calls
    assert len({c["id"] for c in message.tool_calls}) == len(message.tool_calls)


WORDS = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<>|{`"), min_size=1
).map(str.strip)


@st.composite
def answers(draw: st.DrawFn, made: Family) -> Answer:
    """What a model may mean to say, in words that are no markers."""
    arguments = st.fixed_dictionaries({"text": WORDS, "n": st.integers()})
    calls = st.lists(arguments.map(lambda a: Call("add", a)), max_size=min(made.spec.calls, 3))
    made_calls = tuple(draw(calls))
    text = draw(WORDS.filter(bool)) if made.name not in ("llama3",) or not made_calls else ""
    reasoning = draw(st.none() | WORDS.filter(bool)) if made.reasons else None
    return Answer(text, reasoning, made_calls)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_was_meant_is_read(made: Family, data: st.DataObject) -> None:
    meant = data.draw(answers(made))
    ids = made.say(meant.text, reasoning=meant.reasoning, calls=meant.calls)
    read = streamed(parser_of(made), [[i] for i in ids])
    assert (read.content, read.reasoning_content) == (meant.text, meant.reasoning)
    calls = [c["function"] for c in read.tool_calls]
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == [
        (c.name, c.arguments) for c in meant.calls
    ]


def test_white_space_at_an_answers_ends_stays(made: Family) -> None:
    for text in ("    return a + b\n", " x\n\ny \n\n", "\tx", "x\r\n", "x"):
        for reasoning in (None, "Hm.") if made.reasons else (None,):
            ids = made.say(text, reasoning=reasoning)
            for tools in (None, TOOLS):
                for chunks in ([ids], [[i] for i in ids]):
                    read = streamed(parser_of(made, tools), chunks)
                    seen = (read.content, read.reasoning_content, read.tool_calls)
                    assert seen == (text, reasoning, []), (reasoning, tools is None)


def test_white_space_before_a_call_is_the_templates(made: Family) -> None:
    # Llama's answer is a text or a call.
    if made.spec.calls and made.name != "llama3":
        ids = made.say("  a", calls=(Call("add", {"text": "a", "n": 3}),))
        read = streamed(parser_of(made), [[i] for i in ids])
        assert (read.content, len(read.tool_calls)) == ("  a", 1)


@EVERY
def test_arguments_leave_with_their_tokens(name: str) -> None:
    made = family(name)
    if not made.spec.calls:
        return
    text = "a long text, written token by token\n" * 4
    ids = made.say("", calls=(Call("add", {"text": text}),))
    parser, seen, lags = parser_of(made), "", []
    for n, i in enumerate(ids, 1):
        for delta in parser.feed([i]):
            for call in delta.tool_calls or ():
                seen += call["function"]["arguments"]
        raw = made.chat.decode(ids[:n]).rstrip("\ufffd")
        said = seen.partition('"text": "')[2].replace("\\n", "\n")
        if 0 < len(said) < len(text):
            written = raw.replace("\\n", "\n")
            at = written.rfind(said)
            lags.append(len(written) - at - len(said))
    assert len(lags) > 40
    # A line break may be the one before a closing tag; an escape is whole or held back.
    assert max(lags) <= 1


@EVERY
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_text_ends_where_the_engines_stop_string_does(name: str, data: st.DataObject) -> None:
    """The token that completes a stop string is the engine's, and no text from there on leaves."""
    made = family(name)
    fragments = st.sampled_from(SOUP + tuple(made.chat.grammar.marks))
    text = "".join(data.draw(st.lists(fragments, max_size=12)))
    stop = data.draw(st.sampled_from(STOPS[1:]))
    ids = made.encode(text)
    parser, engine = parser_of(made, TOOLS, stop), StopMatcher(stop, made.chat.decode)
    for i in ids:
        if i in made.chat.stop_token_ids:
            return
        parser.feed([i])
        matched = engine.push(i) is not None
        assert parser.stops.matched == matched
        if matched:
            break
    _, message = parser.finish()
    if parser.stops.matched:
        shown = (message.content, message.reasoning_content or "")
        for s in stop:
            assert not any(s in part for part in shown)


JSON_CALL = ' {"n": 5}}\n</tool_call>'
AFTER_NAME = {
    "qwen3": JSON_CALL,
    "unknown": JSON_CALL,
    "qwen3_5": "<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
    "glm": "<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    "deepseek": '{"n": 5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_r1": '{"n": 5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "llama3": ' {"n": 5}}',
    "gpt_oss": '{"n": 5}<|call|>',
}


@pytest.mark.parametrize("stop", [(), ("add", "function")])
def test_a_forced_call_is_read_from_its_opening_on(made: Family, stop: tuple[str, ...]) -> None:
    prompt = made.chat.render([{"role": "user", "content": "hi"}], TOOLS)
    opening = made.chat.open_call(prompt, "add")
    assert (opening is not None) == bool(made.spec.calls)
    if opening is None:
        return
    forced = made.encode(opening)
    parser = made.chat.stream_parser(
        prompt_ids=prompt + forced, tools=TOOLS, stop=(*stop, "no"), forced=forced
    )
    first, *rest = made.encode(AFTER_NAME[made.name])
    deltas = parser.feed([first])
    assert deltas[0].tool_calls is not None
    assert deltas[0].tool_calls[0]["function"] == {"name": "add", "arguments": ""}
    deltas += parser.feed(rest)
    last, message = parser.finish()
    assert joined(deltas + last) == message
    (call,) = message.tool_calls
    if not parser.stops.matched:
        assert json.loads(call["function"]["arguments"]) == {"n": 5}
    assert (message.content, message.reasoning_content) == ("", None)
    one_stop = made.chat.one_call_stop_ids()
    assert one_stop is None or one_stop[0] in rest


def test_a_forced_call_of_any_tool_is_read_by_the_name_that_follows(made: Family) -> None:
    prompt = made.chat.render([{"role": "user", "content": "hi"}], TOOLS)
    opening = made.chat.open_call(prompt, None)
    if opening is None:
        return
    forced = made.encode(opening)
    parser = made.chat.stream_parser(
        prompt_ids=prompt + forced, tools=TOOLS, stop=(), forced=forced
    )
    named = made.chat.open_call(prompt, "add")
    assert named is not None and named.startswith(opening)
    parser.feed(made.encode(named[len(opening) :] + AFTER_NAME[made.name]))
    (call,) = parser.finish()[1].tool_calls
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"n": 5}
