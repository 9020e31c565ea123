"""Whether a model is told of tools."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.chat.tool_visibility import ToolVisibility, tool_visibility
from tests.support.families import family

_PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
)


def of_template(source: Path, target: Path, template: str) -> ChatFormat:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    (target / "chat_template.jinja").write_text(template)
    return load_chat_format(str(target), enable_thinking=None)


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
def test_templates(
    tiny_model_dir: Path, tmp_path: Path, before: str, showing: ToolVisibility
) -> None:
    chat = of_template(tiny_model_dir, tmp_path / "m", before + _PLAIN)
    assert tool_visibility(chat) == showing
