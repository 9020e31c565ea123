"""The laws of the chat format, and a proxy's start that depends on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from any_agent.chat import ChatFormat, MessageDelta, load_chat_format
from any_agent.config import Config, ModelConfig
from any_agent.doctor.startup_check import chat_laws, require_passing
from any_agent.doctor.verdict import CheckOutcome, Verdict, broken
from any_agent.errors import ConfigError

NO_THINKING = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("renderer", "thinking"),
    [
        pytest.param(*both, marks=() if "auto" in both or None in both else pytest.mark.service)
        for both in product(["auto", "qwen3", "default"], [None, True, False])
    ],
)
async def test_the_demos_format_is_sound(
    tiny_model_dir: Path, renderer: str, thinking: bool | None
) -> None:
    chat = load_chat_format(str(tiny_model_dir), renderer=renderer, enable_thinking=thinking)
    verdicts = await chat_laws(chat, {} if thinking is None else {"enable_thinking": thinking})
    assert not broken(verdicts)
    assert len(verdicts) == 11 + 5 + 7
    unchecked = {(v.law, v.case) for v in verdicts if v.outcome is not CheckOutcome.PASSED}
    off = {("continuation", "after reasoning")}
    off |= {("parsing", "reasoning"), ("parsing", "unclosed reasoning")}
    assert unchecked == (off if thinking is False else set())


async def laws(chat: ChatFormat, **settings: bool) -> dict[tuple[str, str], Verdict]:
    return {(v.law, v.case): v for v in await chat_laws(chat, settings)}


async def failures(chat: ChatFormat) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for v in broken(await chat_laws(chat, NO_THINKING)):
        assert v.seen and v.do
        found.setdefault(v.law, set()).add(v.case)
    return found


async def test_a_renderer_that_changes_a_tool_result_fails_rendering(chat: ChatFormat) -> None:
    template = chat.tokenizer.chat_template
    chat.tokenizer.chat_template = template.replace(
        "{{- '\\n<tool_response>\\n'", "{{- '\\n<tool_response>'"
    )
    assert chat.tokenizer.chat_template != template
    assert await failures(chat) == {
        "rendering": {"tool result", "two tool results"},
        "continuation": {"after a call", "after two calls"},
    }


async def test_a_renderer_that_changes_the_prompt_fails_rendering(chat: ChatFormat) -> None:
    chat.tokenizer.chat_template = chat.tokenizer.chat_template.replace(
        "<|im_start|>assistant\\n'", "<|im_start|>assistant '"
    )
    found = await failures(chat)
    assert found["rendering"] >= {"user", "system", "tools", "tool result"}
    assert found["continuation"] >= {"after text", "after a call"}


async def test_a_continuation_that_is_declined_is_no_failure(tiny_model_dir: Path) -> None:
    chat = load_chat_format(
        str(tiny_model_dir), enable_thinking=False, thinking_retention="tool_cycle"
    )
    verdicts = await laws(chat, **NO_THINKING)
    assert not broken(verdicts.values())
    declined = verdicts["continuation", "after text"]
    assert declined.outcome is CheckOutcome.DECLINED
    assert declined.seen.startswith("rendered anew: ")
    assert verdicts["continuation", "after a call"].outcome is CheckOutcome.PASSED


async def test_a_stream_parser_that_loses_text_fails_parsing(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = chat.stream_parser

    class Losing:
        def __init__(self, **how: object) -> None:
            self._parser = whole(**how)  # type: ignore[arg-type]

        def feed(self, ids: list[int]) -> list[MessageDelta]:
            return self._parser.feed(ids)[1:]

        def finish(self, **how: object) -> object:
            return self._parser.finish(**how)  # type: ignore[arg-type]

    monkeypatch.setattr(chat, "stream_parser", Losing)
    found = await failures(chat)
    assert found["parsing"] >= {"text", "call", "two calls"}


async def test_a_law_that_breaks_off_is_broken(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(chat, "render", explode)
    verdicts = await chat_laws(chat, NO_THINKING)
    assert {v.law for v in broken(verdicts)} == {"rendering", "continuation", "parsing"}
    assert all("boom" in v.seen for v in broken(verdicts))


_TURN = "{{ '<|im_start|>' + m.role + '\\n' + (CONTENT) + '<|im_end|>\\n' }}"
_PLAIN = (
    "{% for m in messages %}" + _TURN + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
_ALTERNATION = (
    "{% for m in messages if m.role != 'system' %}"
    "{% if (m.role == 'user') != loop.index0 is even %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("before", "content"),
    [
        ("", "m.content"),
        (_ALTERNATION, "m.content"),
        ("{{ strftime_now('%H:%M:%S.%f') }}", "m.content"),
        ("{{ 'Today: ' + strftime_now('%d %b %Y') }}", "m.content"),
        ("", "m.content | trim"),
        ("", "m.content | upper"),
        ("", "m.content.split('</think>')[-1] | trim"),
        (_NO_SYSTEM, "m.content"),
    ],
)
async def test_odd_habits_of_a_template_are_no_broken_laws(
    with_template: Callable[[Callable[[str], str]], Path], before: str, content: str
) -> None:
    """A false alarm would stop the training of a sound model."""
    folder = with_template(lambda _: before + _PLAIN.replace("CONTENT", content))
    chat = load_chat_format(str(folder), enable_thinking=None)
    assert not broken(await chat_laws(chat, {}))


_GEMMA = _NO_SYSTEM + _ALTERNATION


async def test_a_template_of_neither_system_nor_tools_is_sound(
    with_template: Callable[[Callable[[str], str]], Path],
) -> None:
    folder = with_template(lambda _: _GEMMA + _PLAIN.replace("CONTENT", "m.content"))
    chat = load_chat_format(str(folder), enable_thinking=None)
    await require_passing(chat, config_of(folder), training=True)
    verdicts = await laws(chat)
    for law, case in (
        *(("rendering", case) for case in ("tools", "tool result")),
        *(("continuation", case) for case in ("after a call", "after two calls")),
        ("parsing", "call"),
    ):
        assert verdicts[law, case].outcome is CheckOutcome.DECLINED
        assert "shows no tools" in verdicts[law, case].seen
    system = verdicts["rendering", "system"]
    assert system.outcome is CheckOutcome.UNCHECKED
    assert "400 template_error" in system.seen
    assert verdicts["continuation", "after text"].outcome is CheckOutcome.PASSED


async def test_calls_that_a_template_refuses_are_no_broken_law(
    with_template: Callable[[Callable[[str], str]], Path],
) -> None:
    """It shows tools, and takes no results of calls."""
    shows = "{% if tools %}{{ tools | tojson }}{% endif %}"
    folder = with_template(lambda _: _GEMMA + shows + _PLAIN.replace("CONTENT", "m.content"))
    chat = load_chat_format(str(folder), enable_thinking=None)
    verdicts = await laws(chat)
    assert not broken(verdicts.values())
    assert verdicts["rendering", "tools"].outcome is not CheckOutcome.DECLINED
    after = verdicts["continuation", "after a call"]
    assert after.outcome is CheckOutcome.UNCHECKED and "400 template_error" in after.seen


def config_of(model: Path, renderer: str = "auto") -> Config:
    model_config = ModelConfig(path=str(model), renderer=renderer, enable_thinking=False)
    return Config(model=model_config)


async def test_a_start_is_refused_for_training_only(
    chat: ChatFormat, tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tiny_model_dir)
    await require_passing(chat, config, training=True)
    template = chat.tokenizer.chat_template
    chat.tokenizer.chat_template = template.replace("<tool_response>\\n'", "<tool_response>'")
    with pytest.raises(ConfigError) as refused:
        await require_passing(chat, config, training=True)
    said = refused.value.message
    assert "rendering, tool result: " in said and "continuation, after a call: " in said
    assert "to do: " in said and f"any-agent doctor {tiny_model_dir}" in said
    with caplog.at_level(logging.WARNING):
        await require_passing(chat, config, training=False)
    assert "could not be trained exactly" in caplog.text and "tool result" in caplog.text


async def test_calls_in_an_unknown_form_are_declined_and_not_broken(
    with_template: Callable[[Callable[[str], str]], Path],
) -> None:
    folder = with_template(
        lambda text: text.replace("<tool_call>\\n{", "[[call {").replace("}\\n</tool_call>", "}]]")
    )
    chat = load_chat_format(str(folder), renderer="default", enable_thinking=False)
    verdicts = await laws(chat, **NO_THINKING)
    assert not broken(verdicts.values())
    assert verdicts["parsing", "call"].outcome is CheckOutcome.DECLINED
