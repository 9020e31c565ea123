"""Rendering and exact continuation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.errors import ConfigError, InvalidRequest, TemplateError
from tests.support.errors import fails_with

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
]
START = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 1"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NEW = st.lists(
    st.one_of(
        TEXT.map(lambda t: {"role": "user", "content": t}),
        TEXT.map(lambda t: {"role": "tool", "content": t, "tool_call_id": "c1"}),
        TEXT.map(lambda t: {"role": "developer", "content": [{"type": "text", "text": t}]}),
    ),
    min_size=1,
    max_size=3,
)
OUTPUTS = st.one_of(
    st.lists(st.integers(9, 379), max_size=8),
    st.sampled_from(
        ["4", "", CALL, CALL[:20], "<think>\nwhy\n</think>\n\n4", "<think>\nwh", "a\n"]
    ),
)


@pytest.mark.parametrize("name", ["qwen3", "thinking", "default"])
@settings(max_examples=80, deadline=None)
@given(turns=st.lists(st.tuples(OUTPUTS, st.booleans(), NEW), min_size=1, max_size=3),
       tools=st.booleans())  # fmt: skip
def test_a_bridge_holds_the_new_messages(
    request: pytest.FixtureRequest, name: str, turns: list[Any], tools: bool
) -> None:
    chat: ChatFormat = request.getfixturevalue(name)
    given_tools = TOOLS if tools else None
    prompt = chat.render(START, given_tools)
    end = prompt_end(chat)
    for output, closed, new in turns:
        ids = output if isinstance(output, list) else encode(chat, output)
        ids = ids + [chat.stop_token_ids[0]] * closed
        following = chat.bridge(ids, new, given_tools, prompt_tail=prompt[-64:])
        assert following is not None
        assert following[-len(end) :] == end
        tail = chat.decode(following)
        for closer in ("</tool_call>", "</think>"):
            tail = tail.removeprefix(closer)
        assert tail.startswith("\n" if closed else "<|im_end|>\n")
        for m in new:
            text = m["content"] if isinstance(m["content"], str) else m["content"][0]["text"]
            assert text in tail
        prompt = [*prompt, *ids, *following]


def encode(chat: ChatFormat, text: str) -> list[int]:
    return list(chat.tokenizer.encode(text, add_special_tokens=False))


def prompt_end(chat: ChatFormat) -> list[int]:
    return chat.render(START, None)[-3:]


def test_a_bridge_declines(qwen3: ChatFormat) -> None:
    assert qwen3.bridge([20, qwen3.stop_token_ids[0]], [], None) is None
    with pytest.raises(InvalidRequest):
        qwen3.bridge([20], [{"role": "user"}], None)


def test_renders_as_the_template_does(qwen3: ChatFormat, default: ChatFormat) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": t} for t in ("Be ", "brief.")]},
        {"role": "user", "content": "né"},
    ]
    assert qwen3.name, default.name == ("qwen3", "default")
    for tools in (None, [], TOOLS):
        assert qwen3.render(messages, tools) == default.render(messages, tools)
    assert qwen3.decode(qwen3.render(messages, None)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nné<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert qwen3.vocab_size == len(qwen3.tokenizer)
    assert [qwen3.decode([i]) for i in qwen3.stop_token_ids] == ["<|im_end|>", "<|endoftext|>"]


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        (None, "messages"),
        ([USER, 5], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": []}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": 5}], "messages[0].tool_call_id"),
    ],
)
def test_a_wrong_message_is_named(qwen3: ChatFormat, messages: Any, where: str) -> None:
    with fails_with(InvalidRequest, status=400, param=where) as e:
        qwen3.render(messages, None)
    assert e.value.message.startswith(where)


@pytest.mark.parametrize(
    "tools",
    [5, [5], [{}], [{"function": {"name": 5}}], [{"function": {"name": "f", "x": "\ud800"}}]],
    ids=range(5),
)
def test_malformed_tools_are_refused(qwen3: ChatFormat, tools: Any) -> None:
    with pytest.raises(InvalidRequest):
        qwen3.render([USER], tools)


def test_what_the_template_refuses(tiny_model_dir: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    chat = load_chat_format(copied_with_template(tiny_model_dir, tmp_path / "x", template))
    assert chat.render([USER], None)
    result = {"role": "tool", "content": "x", "tool_call_id": "1"}
    with fails_with(TemplateError, "no tools here", param="messages"):
        chat.render([result], None)
    assert chat.bridge([21], [result], None) is None


def test_loading_says_what_is_wrong(tiny_model_dir: Path, tmp_path: Path) -> None:
    with fails_with(ConfigError, "/no/such/dir"):
        load_chat_format("/no/such/dir")
    with fails_with(ConfigError, tmp_path, "tokenizer"):
        load_chat_format(str(tmp_path))
    with fails_with(ConfigError, "'nonsense'"):
        load_chat_format(str(tiny_model_dir), renderer="nonsense")
    with fails_with(ConfigError, "thinking_retention"):
        load_chat_format(str(tiny_model_dir), thinking_retention="some")
    with fails_with(ConfigError, "renderer gpt-oss"):
        load_chat_format(str(tiny_model_dir), renderer="gpt-oss")


def copied_with_template(source: Path, target: Path, template: str | None) -> str:
    import shutil

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    jinja = target / "chat_template.jinja"
    if template is None:
        jinja.unlink()
    else:
        jinja.write_text(template)
    return str(target)


def test_another_template_is_taken_as_it_is(tiny_model_dir: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    path = copied_with_template(tiny_model_dir, tmp_path / "other", template)
    chat = load_chat_format(path)
    assert chat.name == "default"
    assert chat.decode(chat.render([USER], None)) == "[user]x<|im_end|>[assistant]"
    following = chat.bridge([20], [USER], None)
    assert following is not None
    assert chat.decode(following) == "<|im_end|>[user]x<|im_end|>[assistant]"
    with fails_with(ConfigError, path, "renderer qwen3"):
        load_chat_format(path, renderer="qwen3")


def test_a_template_that_cannot_be_rendered(tiny_model_dir: Path, tmp_path: Path) -> None:
    broken = copied_with_template(
        tiny_model_dir, tmp_path / "broken", "{{ raise_exception('no') }}"
    )
    with fails_with(ConfigError, broken, "renderer default"):
        load_chat_format(broken, renderer="default")
    none = copied_with_template(tiny_model_dir, tmp_path / "none", None)
    with fails_with(ConfigError, none, "chat_template.jinja"):
        load_chat_format(none, renderer="default")
