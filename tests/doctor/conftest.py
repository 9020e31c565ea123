from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from any_agent.chat import ChatFormat, load_chat_format
from tests.support.ports import own_port
from tests.support.real_parts import embedded_engine


@pytest.fixture
def chat(tiny_model_dir: Path) -> ChatFormat:
    """A new one for each test, which may change its template: the renderer writes by itself."""
    return load_chat_format(str(tiny_model_dir), renderer="qwen3", enable_thinking=False)


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real one, of the tiny model."""
    folder = tmp_path_factory.mktemp("engine")
    with embedded_engine(tiny_model_dir, own_port(), folder) as url:
        yield url


@pytest.fixture
def with_template(tiny_model_dir: Path, tmp_path: Path) -> Callable[[Callable[[str], str]], Path]:
    """The tiny model with its chat template changed."""

    def copy(change: Callable[[str], str]) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny_model_dir, folder)
        jinja = folder / "chat_template.jinja"
        before = jinja.read_text()
        jinja.write_text(change(before))
        assert jinja.read_text() != before
        return folder

    return copy
