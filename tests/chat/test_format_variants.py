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
    return family("qwen3").load()


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


def test_a_call_that_thinks_is_stripped_as_the_template_does() -> None:
    """Also in a run that does not think, where nothing is to be taken out otherwise."""
    run = family("qwen3").load(thinking_retention="template")
    plain = family("qwen3").say("It is 3.")
    assert run.bridge(plain, USER, None) is not None
    on = run.variant({"enable_thinking": True})
    assert on.bridge(plain, USER, None) is None
    assert on.decline_reason(USER) == "thinking_stripped"


def test_what_changes_the_conversation_has_a_key() -> None:
    glm = family("glm", thinking=True).load()
    off = glm.variant({"enable_thinking": False})
    assert glm.decode(off.render(USER, None)).count("/nothink") == 1
    assert off.render_key
    oss = family("gpt_oss").load()
    keys = [oss.variant({"reasoning_effort": e}).render_key for e in ("low", "high")]
    assert len({*keys, b""}) == 3
    assert all(len(key) == 16 for key in keys)


def test_true_and_one_are_two(qwen3: ChatFormat) -> None:
    assert qwen3.variant({"enable_thinking": 1}) is not qwen3.variant({"enable_thinking": True})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "object"),
        ("x", "object"),
        ({"enable_thinking": {}}, "256"),
        ({"enable_thinking": [[]]}, "256"),
        ({"enable_thinking": "x" * 100_000}, "256"),
        ({"enable_thinking": "\ud800"}, "256"),
        ({"enable_thinking": float("nan")}, "256"),
        ({"enable_thinking": 10**5000}, "256"),
        ({str(n): 1 for n in range(1000)}, "16"),
        ({"messages": "x"}, "enable_thinking"),
        ({"add_generation_prompt": False}, "enable_thinking"),
        ({"chat_template": "x"}, "enable_thinking"),
        ({"tokenize": True}, "enable_thinking"),
        ({"\ud800" * 500: 1}, "enable_thinking"),
        ({5: 1}, "enable_thinking"),
    ],
    ids=range(15),
)
def test_malformed_settings_of_a_template_are_refused_shortly(
    qwen3: ChatFormat, settings: Any, message: str
) -> None:
    with fails_with(InvalidRequest, message, param="chat_template_kwargs", status=400) as e:
        qwen3.variant(settings)
    assert len(e.value.message.encode()) < 500


def test_a_template_without_settings_says_so() -> None:
    with fails_with(UnsupportedParameter, "'enable_thinking'", param="chat_template_kwargs"):
        family("unknown").load().variant({"enable_thinking": True})


def test_a_renderer_has_variants_too() -> None:
    named = family("qwen3").load(renderer="qwen3")
    on = named.variant({"enable_thinking": True})
    assert on.decode(on.render(USER, None)).endswith("assistant\n")
    with fails_with(InvalidRequest, "enable_thinking", param="chat_template_kwargs"):
        named.variant({"enable_thinking": "maybe"})
    with fails_with(
        UnsupportedParameter, "'other'", "enable_thinking", param="chat_template_kwargs"
    ):
        named.variant({"other": 1})


@pytest.mark.parametrize(
    ("effort", "known", "own", "means"),
    [
        ("low", {"reasoning_effort", "enable_thinking"}, {}, {"reasoning_effort": "low"}),
        ("minimal", {"reasoning_effort"}, {}, {"reasoning_effort": "low"}),
        ("xhigh", {"reasoning_effort"}, {}, {"reasoning_effort": "high"}),
        ("max", {"reasoning_effort"}, {}, {"reasoning_effort": "high"}),
        ("none", {"enable_thinking"}, {}, {"enable_thinking": False}),
        ("high", {"enable_thinking"}, {}, {"enable_thinking": True}),
        ("high", {"enable_thinking"}, {"enable_thinking": False}, {}),
        ("none", {"thinking"}, {}, {"thinking": False}),
        ("high", set(), {}, {}),
    ],
)
def test_an_effort_becomes_the_templates_setting(
    effort: str, known: set[str], own: dict[str, Any], means: dict[str, Any]
) -> None:
    assert effort_settings(effort, frozenset(known), own) == means


def test_an_unknown_effort_is_refused_with_the_known_ones(qwen3: ChatFormat) -> None:
    with fails_with(
        InvalidRequest, "none, minimal, low, medium, high, xhigh, max", param="reasoning_effort"
    ):
        qwen3.effort_kwargs("extreme")
