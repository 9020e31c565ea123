"""Tools that a model would never be told of are refused, not left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.chat.format_probes import TOOLS, USER
from any_agent.completions.prompt import Prompt, parent_of, prompt_of
from any_agent.errors import UnsupportedParameter
from tests.support.chat_templates import with_template
from tests.support.completions.params import parse
from tests.support.errors import fails_with

_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def asked(chat: ChatFormat, **fields: Any) -> Prompt:
    call = parse(messages=[USER], **fields)
    return prompt_of(call, parent_of(call, None, chat, context_length=4096), None, chat)


def test_tools_that_no_prompt_shows_are_refused_unless_none_may_be_called(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    chat = with_template(tmp_path / "plain", _TEMPLATE, enable_thinking=None)
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}):
        with fails_with(UnsupportedParameter, param="tools", status=400):
            asked(chat, tools=TOOLS, **choice)
    without = asked(chat)
    assert asked(chat, tools=TOOLS, tool_choice="none").ids.tolist() == without.ids.tolist()
    shows = load_chat_format(str(tiny_model_dir), enable_thinking=False)
    assert len(asked(shows, tools=TOOLS).ids) > len(asked(shows).ids)
