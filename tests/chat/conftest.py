from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.chat import ChatFormat, load_chat_format
from tests.support.families import Family, family
from tests.support.laws.cases import FAMILIES, label


@pytest.fixture(scope="session")
def qwen3(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir))


@pytest.fixture(scope="session")
def default(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir), renderer="default")


@pytest.fixture(scope="session", params=[*FAMILIES, ("qwen3_5", False)], ids=label)
def made(request: pytest.FixtureRequest) -> Family:
    """Every family in miniature, with thinking and without it."""
    name, thinking = request.param
    return family(name, thinking=thinking)
