"""A call's own settings of the chat template."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.chat import ChatFormat
from any_agent.chat.template_kwargs import effort_settings
from any_agent.errors import InvalidRequest, UnsupportedParameter
from tests.support.errors import fails_with
from tests.support.families import family

USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def qwen3() -> ChatFormat:
    return family("qwen3").chat


def test_thinking_is_turned_on_for_one_call(qwen3: ChatFormat) -> None:
    on = qwen3.variant({"enable_thinking": True})
    assert on.decode(on.render(USER, None)).endswith("assistant\n")
    assert qwen3.decode(qwen3.render(USER, None)).endswith("</think>\n\n")
    ended = [20, qwen3.stop_token_ids[0]]
    following = on.bridge(ended, USER, None)
    assert following is not None
    assert on.decode(following).endswith("assistant\n")
    assert (on.render_key, qwen3.render_key) == (b"", b"")
    assert qwen3.variant({"enable_thinking": True}) is on
    assert qwen3.variant({"enable_thinking": False}) is qwen3
    assert qwen3.variant({}) is qwen3
    assert on.variant({"enable_thinking": False}) is not on
    assert qwen3.variant({"enable_thinking": 1}) is not on, "true and one are two"


def test_a_call_that_thinks_is_stripped_as_the_template_does() -> None:
    """Also in a run that does not think, where nothing is to be taken out otherwise."""
    run = family("qwen3").load(thinking_retention="template")
    plain = family("qwen3").say("It is 3.")
    assert run.bridge(plain, USER, None) is not None
    on = run.variant({"enable_thinking": True})
    assert on.bridge(plain, USER, None) is None
    assert on.decline_reason(USER) == "thinking_stripped"


def test_a_setting_that_changes_the_rendering_has_a_render_key() -> None:
    glm = family("glm", thinking=True).load()
    off = glm.variant({"enable_thinking": False})
    assert glm.decode(off.render(USER, None)).count("/nothink") == 1
    assert off.render_key
    oss = family("gpt_oss").chat
    keys = [oss.variant({"reasoning_effort": e}).render_key for e in ("low", "high")]
    assert len({*keys, b""}) == 3
    assert all(len(key) == 16 for key in keys)


def test_malformed_settings_of_a_template_are_refused_shortly(qwen3: ChatFormat) -> None:
    values = ({}, [[]], "x" * 100_000, "\ud800", float("nan"), 10**5000)
    names: tuple[Any, ...] = ("messages", "add_generation_prompt", "tokenize", "\ud800" * 500, 5)
    wrong: list[Any] = [
        *([], "x", {str(n): 1 for n in range(1000)}),
        *({"enable_thinking": value} for value in values),
        *({name: "x"} for name in names),
    ]
    for settings in wrong:
        with fails_with(InvalidRequest, param="chat_template_kwargs", status=400) as e:
            qwen3.variant(settings)
        assert len(e.value.message.encode()) < 500


def test_a_named_renderer_takes_a_calls_own_settings_and_a_plain_template_none() -> None:
    with fails_with(UnsupportedParameter, "'enable_thinking'", param="chat_template_kwargs"):
        family("unknown").chat.variant({"enable_thinking": True})
    named = family("qwen3").load(renderer="qwen3")
    on = named.variant({"enable_thinking": True})
    assert on.decode(on.render(USER, None)).endswith("assistant\n")
    with fails_with(InvalidRequest, "enable_thinking", param="chat_template_kwargs"):
        named.variant({"enable_thinking": "maybe"})
    with fails_with(
        UnsupportedParameter, "'other'", "enable_thinking", param="chat_template_kwargs"
    ):
        named.variant({"other": 1})


def test_an_effort_becomes_the_templates_setting_or_is_refused(qwen3: ChatFormat) -> None:
    cases: list[tuple[str, set[str], dict[str, Any], dict[str, Any]]] = [
        ("low", {"reasoning_effort", "enable_thinking"}, {}, {"reasoning_effort": "low"}),
        ("minimal", {"reasoning_effort"}, {}, {"reasoning_effort": "low"}),
        ("max", {"reasoning_effort"}, {}, {"reasoning_effort": "high"}),
        ("none", {"enable_thinking"}, {}, {"enable_thinking": False}),
        ("high", {"enable_thinking"}, {}, {"enable_thinking": True}),
        ("high", {"enable_thinking"}, {"enable_thinking": False}, {}),
        ("none", {"thinking"}, {}, {"thinking": False}),
        ("high", set(), {}, {}),
    ]
    for effort, known, own, means in cases:
        assert effort_settings(effort, frozenset(known), own) == means
    with fails_with(
        InvalidRequest, "none, minimal, low, medium, high, xhigh, max", param="reasoning_effort"
    ):
        qwen3.effort_kwargs("extreme")
