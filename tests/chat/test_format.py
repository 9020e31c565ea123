"""Rendering and exact continuation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.errors import ConfigError, InvalidRequest, TemplateError
from tests.support.chat_templates import model_with
from tests.support.errors import fails_with


def test_a_bridge_is_of_new_and_sound_messages(qwen3: ChatFormat) -> None:
    assert qwen3.bridge([20, qwen3.stop_token_ids[0]], [], None) is None
    with pytest.raises(InvalidRequest):
        qwen3.bridge([20], [{"role": "user"}], None)


USER = {"role": "user", "content": "x"}


def calling(**function: Any) -> list[Any]:
    return [{"role": "assistant", "tool_calls": [{"function": function} if function else {}]}]


WRONG: list[tuple[Any, str]] = [
    ([], ""),
    (None, ""),
    ([USER, 5], "[1]"),
    ([{"content": "x"}], "[0].role"),
    ([{"role": ["user"], "content": "x"}], "[0].role"),
    ([{"role": "user"}], "[0].content"),
    *(([{"role": "user", "content": value}], "[0].content") for value in (5, "\ud800")),
    *(
        ([{"role": "user", "content": [part]}], "[0].content[0]")
        for part in ({"type": "text"}, "x", {"type": "image_url"}, {"type": []})
    ),
    ([{"role": "assistant", "tool_calls": 5}], "[0].tool_calls"),
    (calling(), "[0].tool_calls[0].function"),
    (calling(name="f", arguments=5), "[0].tool_calls[0].function.arguments"),
    ([{"role": "tool", "content": "x", "tool_call_id": 5}], "[0].tool_call_id"),
]


def test_a_wrong_message_is_named_by_its_place(qwen3: ChatFormat) -> None:
    for messages, place in WRONG:
        with fails_with(InvalidRequest, status=400, param=f"messages{place}"):
            qwen3.render(messages, None)
    lone = [{"function": {"name": "f", "x": "\ud800"}}]
    for tools in (5, [5], [{}], [{"function": {"name": 5}}], lone):
        with pytest.raises(InvalidRequest):
            qwen3.render([USER], tools)


def test_a_refusal_of_the_template_is_a_template_error(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    chat = load_chat_format(model_with(tmp_path / "x", template, tiny_model_dir))
    assert chat.render([USER], None)
    result = {"role": "tool", "content": "x", "tool_call_id": "1"}
    with fails_with(TemplateError, "no tools here", param="messages"):
        chat.render([result], None)
    assert chat.bridge([21], [result], None) is None


def test_a_format_that_cannot_be_loaded_is_refused_with_its_reason(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with fails_with(ConfigError, tmp_path, "tokenizer"):
        load_chat_format(str(tmp_path))
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("/no/such/dir", {}, "/no/such/dir"),
        (str(tiny_model_dir), {"renderer": "nonsense"}, "'nonsense'"),
        (str(tiny_model_dir), {"thinking_retention": "some"}, "thinking_retention"),
        (str(tiny_model_dir), {"renderer": "gpt-oss"}, "renderer gpt-oss"),
    ]
    for path, options, named in wrong:
        with fails_with(ConfigError, named):
            load_chat_format(path, **options)


def test_a_template_that_cannot_be_rendered_is_refused_at_the_start(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    broken = model_with(tmp_path / "broken", "{{ raise_exception('no') }}", tiny_model_dir)
    with fails_with(ConfigError, broken, "renderer default"):
        load_chat_format(broken, renderer="default")
    other = model_with(tmp_path / "other", "{{ messages }}{{ add_generation_prompt }}")
    with fails_with(ConfigError, other, "renderer qwen3"):
        load_chat_format(other, renderer="qwen3")
    none = model_with(tmp_path / "none", None, tiny_model_dir)
    with fails_with(ConfigError, none, "chat_template.jinja"):
        load_chat_format(none, renderer="default")
