from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.chat import ChatFormat, load_chat_format


@pytest.fixture(scope="session")
def qwen3(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir))


@pytest.fixture(scope="session")
def default(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir), renderer="default")


@pytest.fixture(scope="session")
def thinking(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir), enable_thinking=True)
