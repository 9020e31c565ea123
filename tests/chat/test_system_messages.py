"""Several system messages at the beginning, with templates that take them and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from any_agent.chat import ChatFormat
from any_agent.errors import TemplateError
from any_agent.types import Message
from tests.support.chat_templates import with_template
from tests.support.errors import fails_with
from tests.support.families import Family, family

SYSTEM: Message = {"role": "system", "content": "Be brief."}
DEVELOPER: Message = {"role": "developer", "content": "Be kind.\n"}
EMPTY: Message = {"role": "system", "content": ""}
USER: Message = {"role": "user", "content": "Sum 1 and 2"}
SAID: Message = {"role": "assistant", "content": "3"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('first only') }}{% endif %}{% endfor %}"
    + TURNS
    + "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    "{% if add_generation_prompt and '/curt' in messages[0].content %}<think></think>{% endif %}"
)


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def written_apart(chat: ChatFormat, messages: list[Message], tools: Any) -> list[int] | None:
    """Return the ids that the template alone writes; None if it refuses the messages."""
    plain = [{**m, "role": m["role"].replace("developer", "system")} for m in messages]
    settings = {**chat.renderer.settings, "add_generation_prompt": True, "return_dict": False}
    try:
        ids = chat.tokenizer.apply_chat_template(plain, tools=tools, **settings)
    except Exception:
        return None
    return list(ids)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_system_messages_are_joined_only_where_the_template_refuses_them(
    made: Family, tools: Any
) -> None:
    chat = made.chat
    joined = chat.render([system("Be brief.\n\nBe kind.\n"), USER], tools)
    apart = written_apart(chat, [SYSTEM, DEVELOPER, USER], tools)
    assert chat.render([SYSTEM, DEVELOPER, USER], tools) == (joined if apart is None else apart)
    if made.name in ("qwen3_5", "unknown_plain"):
        assert apart is None
        assert chat.render([SYSTEM, EMPTY, DEVELOPER, USER], tools) == joined
        # A model that thinks gives no such answer.
        assert made.thinking or chat.answer_ids([SYSTEM, DEVELOPER, USER, SAID], tools, joined)
    if made.name in ("qwen3", "glm", "unknown"):
        assert apart is not None


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, USER, SYSTEM, USER],
        [SYSTEM, DEVELOPER, USER, SAID, DEVELOPER, USER],
        [{**SYSTEM, "name": "a"}, {**DEVELOPER, "name": "b"}, USER],
    ],
    ids=["later", "later, after an answer", "names"],
)
def test_other_system_messages_stay_the_template_s_error(messages: list[Message]) -> None:
    with fails_with(TemplateError, code="template_error", param="messages"):
        family("qwen3_5").chat.render(messages, None)


def test_words_that_a_joined_message_has_change_what_follows(tmp_path: Path) -> None:
    chat = with_template(tmp_path / "model", STRICT, renderer="default")
    output = [*chat.encode("3", special=False), chat.stop_token_ids[0]]
    for second in (DEVELOPER, {**DEVELOPER, "content": "/curt"}):
        past = [SYSTEM, second, USER]
        following = chat.bridge(output, [USER], None, answer=SAID, past=past)
        assert following is not None
        assert chat.render([*past, SAID, USER], None)[-len(following) :] == following
        assert chat.decode(following).endswith("</think>") == (second is not DEVELOPER)
