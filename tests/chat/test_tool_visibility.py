"""Whether a model is told of tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.chat.tool_visibility import ToolVisibility, tool_visibility
from tests.support.chat_templates import with_template
from tests.support.families import family

_PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
)


def test_prompts_of_families_show_tools_and_deepseeks_only_their_calls() -> None:
    for name in ("qwen3", "llama3", "glm", "gpt_oss"):
        assert tool_visibility(family(name).chat).tools, name
    assert tool_visibility(family("deepseek").chat) == ToolVisibility(tools=False, calls=True)


TEMPLATES = {
    "": (False, False),
    "additional ": (False, False),
    "{{ strftime_now('%f') }}": (False, False),
    "{{ tools | tojson if tools }}": (True, False),
    # It says so itself, in its own words.
    "{% if tools %}{{ raise_exception('no') }}{% endif %}": (True, False),
}
"""Beginnings of templates: whether they tell of tools, and of calls."""


@pytest.mark.parametrize("before", TEMPLATES)
def test_whether_a_template_tells_a_model_of_tools(tmp_path: Path, before: str) -> None:
    chat = with_template(tmp_path / "m", before + _PLAIN, enable_thinking=None)
    assert tool_visibility(chat) == ToolVisibility(*TEMPLATES[before])
