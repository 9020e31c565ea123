"""The families that are known by name, and what stands in where one is not what it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from any_agent.chat import load_chat_format
from any_agent.chat.bridge import TemplateRenderer
from any_agent.chat.families import BY_MODEL_TYPE, BY_NAME, FAMILIES
from any_agent.chat.prompt_renderer import LibraryRenderer
from tests.support.chat_templates import model_with, with_template
from tests.support.families import family


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("qwen3", "qwen3"),
        ("qwen3_5", "qwen3.5"),
        ("llama3", "llama-3"),
        ("glm", "glm-4.5"),
        ("deepseek", "deepseek-v3"),
        ("deepseek_r1", "deepseek-r1"),
        ("gpt_oss", "gpt-oss"),
        ("unknown", "default"),
        ("unknown_plain", "default"),
    ],
)
def test_a_family_is_known_and_written_by_its_template(name: str, known: str) -> None:
    made = family(name)
    chat = made.chat
    assert chat.name == known
    assert isinstance(chat.renderer, TemplateRenderer)
    assert made.encode(made.spec.ends[0])[0] in chat.stop_token_ids


def test_every_familys_name_is_known_to_the_renderers_library() -> None:
    from renderers import config_from_name

    assert all(config_from_name(f.name) for f in FAMILIES)
    assert len(BY_NAME) == len(FAMILIES)
    assert len(BY_MODEL_TYPE) == sum(len(f.model_types) for f in FAMILIES)


def test_a_model_type_with_another_vocabulary_is_no_family(tmp_path: Path) -> None:
    """Many models are of type llama; Llama 3 is what has its tokens."""
    shutil.copytree(family("unknown").model_dir, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llama"}))
    assert load_chat_format(str(tmp_path / "model")).name == "default"


def test_another_template_over_a_familys_vocabulary_is_no_family(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its calls may be written in another way, too: Qwen3-Coder is a qwen3_moe."""
    source = (family("qwen3").model_dir / "chat_template.jinja").read_text()
    changed = source.replace("You may call", "Call")
    assert changed != source
    assert with_template(tmp_path / "model", changed).name == "default"
    assert "using the chat template" in caplog.text


def test_a_named_renderer_writes_itself() -> None:
    chat = family("qwen3").load(renderer="qwen3")
    assert isinstance(chat.renderer, LibraryRenderer)
    assert not chat.renderer.escapes_special_tokens
    ended = [20, chat.stop_token_ids[0]]
    user = [{"role": "user", "content": "x"}]
    assert chat.bridge(ended, user, None) == family("qwen3").chat.bridge(ended, user, None)
    cut = chat.bridge([20], user, None)
    assert cut is not None
    assert chat.decode(cut).startswith("<|im_end|>\n<|im_start|>user\nx")
    assert chat.bridge(ended, [{"role": "assistant", "content": "x"}], None) is None
    assert chat.renderer.check_continuation(("assistant",)).refusal


def test_without_a_template_the_familys_renderer_writes(tmp_path: Path) -> None:
    made = family("qwen3")
    chat = load_chat_format(model_with(tmp_path / "model", None))
    user = [{"role": "user", "content": "x"}]
    assert isinstance(chat.renderer, LibraryRenderer)
    assert chat.render(user, None) == made.load().render(user, None)
