"""What templates differ in: the form of calls, the tokenizer's own spaces, where tools stand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from any_agent.chat.template import ChatTemplate
from tests.support.chat_templates import sentencepiece_like, with_template
from tests.support.families import family

USER = {"role": "user", "content": "And 3?"}
ASK = {"role": "user", "content": "Sum"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "call00000", "function": {"name": "add", "arguments": '{"a": "né"}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "3"}


def template_of(source: str) -> ChatTemplate:
    tokenizer = copy.copy(family("qwen3").chat.tokenizer)
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer, {})


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": "né"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "a=né"),
        ("{{ 'as ' + c.function.arguments }}", 'as {"a": "né"}'),
    ],
)
@pytest.mark.parametrize("condition", ["m.tool_calls", "not m.content"])
def test_calls_in_the_form_that_the_template_reads(
    arguments: str, written: str, condition: str
) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and " + condition + " %}"
        "{% for c in m.tool_calls %}[{{ c.function.name }} " + arguments + "]{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    template = template_of(source)
    call = {"type": "function", **CALL}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert template.decode(template.ids([ASK, said], None)) == f"Sum[add {written}]"
    cut = {"id": "1", "function": {"name": "add", "arguments": '{"a": "unfin'}}
    ids = template.ids([ASK, {**said, "tool_calls": [cut]}], None)
    assert "unfin" in template.decode(ids)


def test_settings_are_what_the_template_asks_for() -> None:
    source = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%Y') %}{% endif %}"
        "{{ bos_token }}{{ date_string }}{% for m in messages %}{% set c = m.content %}"
        "{% if loop.first %}{{ c }}{% endif %}{{ c if effort }}{{ range(3) | list }}{% endfor %}"
    )
    template = template_of(source)
    assert template.known_settings == {"date_string", "effort"}
    assert template.is_dated
    assert not template_of("{{ messages }}").is_dated


SPACED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_spaces_that_the_tokenizer_puts(tmp_path: Path, scheme: str) -> None:
    chat = sentencepiece_like(tmp_path / "model", scheme, SPACED)
    said = {"role": "assistant", "content": "a b"}
    prompt = chat.render([ASK], None)
    whole = chat.render([ASK, said, USER], None)
    end = chat.stop_token_ids[0]
    output = whole[len(prompt) : whole.index(end) + 1]
    assert whole[: len(prompt)] == prompt
    following = chat.bridge(output, [USER], None)
    assert following is not None
    assert prompt + output + following == whole
    spelled = chat.render([{"role": "user", "content": "x</s>y [INST] z"}], None)
    if chat.renderer.escapes_special_tokens:
        assert end not in spelled
        assert "x</s>y [INST] z" in chat.decode(spelled)
    own = chat.tokenizer.apply_chat_template([ASK, said, USER], return_dict=False)
    assert whole == list(own)


def test_tools_before_the_last_user_are_no_bridge_for_a_user(tmp_path: Path) -> None:
    """Mistral's way: with a new user message the tools move there; results leave them."""
    template = (
        "{% set last = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if tools and loop.index0 == last.at %}"
        "[TOOLS]{{ tools | tojson }}{% endif %}<|im_start|>{{ m.role }} {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    chat = with_template(tmp_path / "model", template)
    output = [*chat.encode("x", special=False), chat.stop_token_ids[0]]
    assert chat.name == "default"
    assert chat.bridge(output, [USER], None) is not None
    assert chat.bridge(output, [USER], TOOLS) is None
    following = chat.bridge(output, [RESULT], TOOLS, answer=CALLED)
    assert following is not None
    assert chat.render([ASK, CALLED, RESULT], TOOLS)[-len(following) :] == following


def test_what_a_call_was_named_is_known_from_the_answer() -> None:
    """gpt-oss writes the called tool's name before its result, which has it not."""
    made = family("gpt_oss")
    chat: Any = made.load()
    call = {"id": "call00000", "function": {"name": "look", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    output = [20, *made.encode("<|call|>")]
    following = chat.bridge(output, [RESULT], TOOLS, answer=said)
    assert following is not None
    assert chat.decode(following).startswith("<|start|>functions.look to=assistant")
