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


@pytest.mark.parametrize("name", ["qwen3", "llama3", "glm", "gpt_oss"])
def test_families_that_are_told(name: str) -> None:
    assert tool_visibility(family(name).chat).tools


def test_one_that_calls_what_it_is_told_of_in_words() -> None:
    assert tool_visibility(family("deepseek").chat) == ToolVisibility(tools=False, calls=True)


@pytest.mark.parametrize(
    ("before", "showing"),
    [
        ("", ToolVisibility(tools=False, calls=False)),
        ("additional ", ToolVisibility(tools=False, calls=False)),
        ("{{ strftime_now('%f') }}", ToolVisibility(tools=False, calls=False)),
        ("{{ tools | tojson if tools }}", ToolVisibility(tools=True, calls=False)),
        # It says so itself, in its own words.
        (
            "{% if tools %}{{ raise_exception('no') }}{% endif %}",
            ToolVisibility(tools=True, calls=False),
        ),
    ],
)
def test_whether_a_template_tells_a_model_of_tools(
    tmp_path: Path, before: str, showing: ToolVisibility
) -> None:
    chat = with_template(tmp_path / "m", before + _PLAIN, enable_thinking=None)
    assert tool_visibility(chat) == showing
