from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from any_agent import EngineOpenAI
from any_agent.chat import ChatFormat, load_chat_format
from any_agent.engine import SGLangEngine
from tests.support.scripted_engine import ScriptedEngine

Make: TypeAlias = Callable[..., EngineOpenAI]


@pytest.fixture(scope="session")
def chat(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir), enable_thinking=False)


@pytest.fixture
async def engine(chat: ChatFormat) -> AsyncIterator[ScriptedEngine]:
    scripted = ScriptedEngine(decode=chat.decode)
    async with scripted.serve():
        yield scripted


@pytest.fixture
async def make(chat: ChatFormat, engine: ScriptedEngine) -> AsyncIterator[Make]:
    """A client on the scripted engine; settings are the constructor's."""
    async with AsyncExitStack() as stack:
        real = SGLangEngine(engine.url, decode=chat.decode)
        stack.push_async_callback(real.close)

        def client(**settings: Any) -> EngineOpenAI:
            made = EngineOpenAI(real, settings.pop("tokenizer", chat), **settings)
            stack.push_async_callback(made.close)
            return made

        yield client


@pytest.fixture
def client(make: Make) -> EngineOpenAI:
    return make()
