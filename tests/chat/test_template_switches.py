"""Templates that look for words in earlier messages are continued as they would write on."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.chat.template import contains_switch, find_switch_words
from any_agent.types import Message
from tests.support.families import Family, family

TEMPLATE = """
{%- set ns = namespace(thinks=true) -%}
{%- for m in messages -%}
  {%- if m.role in ['system', 'user'] and '/no_think' in m.content -%}
    {%- set ns.thinks = false -%}
  {%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {{- '<|turn|>' + m.role + '\\n' + m.content + '<|done|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|turn|>assistant\\n' + ('' if ns.thinks else '<think>\\n\\n</think>\\n') -}}
{%- endif -%}
"""
NEXT: Message = {"role": "user", "content": "b"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    path: Path = tmp_path_factory.mktemp("telling")
    tokenizer = family("unknown").load().tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    for name in ("config.json", "generation_config.json"):
        (path / name).write_text((family("unknown").model_dir / name).read_text())
    return load_chat_format(str(path))


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    "start",
    [
        [{"role": "user", "content": "a"}],
        [{"role": "user", "content": "a /no_think"}],
        [{"role": "system", "content": "Be brief. /no_think"}, {"role": "user", "content": "a"}],
        [{"role": "developer", "content": "/no_think"}, {"role": "user", "content": "<|done|>"}],
    ],
)
def test_a_bridge_after_a_switch_word_is_what_the_template_writes(
    chat: ChatFormat, start: list[Message], parts: bool
) -> None:
    if parts:
        start = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in start]
    said: Message = {"role": "assistant", "content": "It is 3."}
    output = family("unknown").say("It is 3.")
    tail = chat.render(start, None)[-64:]
    following = chat.bridge(output, [NEXT], None, answer=said, prompt_tail=tail, past=start)
    assert following is not None
    assert chat.render([*start, said, NEXT], None)[-len(following) :] == following
    assert ("<think>" in chat.decode(following)) == ("/no_think" in str(start))


def test_no_family_reads_earlier_messages_for_switch_words(made: Family) -> None:
    """So what was said before is not looked at in them."""
    output = made.say("It is 3.")
    forbidden = [{"role": "user", "content": _Unread()}]
    assert made.chat.bridge(output, [NEXT], None, past=forbidden) is not None


class _Unread:
    def __getattribute__(self, name: str) -> object:
        raise AssertionError("it was looked at")


def test_switch_words_are_those_that_change_what_follows() -> None:
    def follows(past: list[Message]) -> str:
        if past[0]["role"] == "system" and past[0]["content"] == "refused":
            raise ValueError
        return "other" if past[-1]["content"] == "b" else "usual"

    user: Message = {"role": "user", "content": "ok"}
    assert find_switch_words(["a", "b", "refused"], user, follows) == ("b",)


def test_a_switch_word_counts_in_system_and_user_messages_alone() -> None:
    said: Message = {"role": "assistant", "content": "/no_think"}
    assert not contains_switch(("/no_think",), [said, {"role": "tool", "content": None}])
    assert contains_switch(("/x", "/no_think"), [said, {"role": "user", "content": "so /no_think"}])
    assert not contains_switch((), [{"role": "user", "content": "so /no_think"}])
