from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from any_agent.auth.key_store import create_key
from any_agent.chat import ChatFormat, load_chat_format
from any_agent.launcher.trial import trial_dir
from tests.support.proxy import Proxy, config_for, running_proxy
from tests.support.scripted_engine import ScriptedEngine

ADMIN = "operator-secret"


@dataclass(frozen=True, slots=True)
class Served:
    """A rank that needs keys, and a tenant's key there."""

    proxy: Proxy
    tenant_key: str

    @property
    def url(self) -> str:
        return self.proxy.url

    async def state(self, session_id: str) -> str:
        """What has become of a session."""
        return str((await self.info(session_id))["state"])

    async def info(self, session_id: str) -> dict[str, Any]:
        response = await self.proxy.http.get(f"/rl/v1/sessions/{session_id}")
        assert response.status_code == 200, response.text
        return dict(response.json())


Serve: TypeAlias = Callable[..., Awaitable[Served]]


@pytest.fixture(scope="session")
def chat(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir), enable_thinking=False)


@pytest.fixture
async def engine(chat: ChatFormat) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(decode=chat.decode)
    async with engine.serve():
        yield engine


@pytest.fixture
async def serve(tmp_path: Path, chat: ChatFormat, engine: ScriptedEngine) -> AsyncIterator[Serve]:
    """Start a rank on the scripted engine; settings by dotted name, `slots` of train sessions."""
    async with AsyncExitStack() as stack:

        async def start(*settings: str, slots: int = 1000) -> Served:
            config = config_for(tmp_path, f"server.admin_key={ADMIN}", *settings)
            context = running_proxy(config, chat, engine_url=engine.url)
            proxy = await stack.enter_async_context(context)
            if slots:
                await proxy.admit(slots)
            key, _ = create_key(trial_dir(config).keys, "tenant", tenant="agents")
            return Served(proxy, key)

        yield start


@pytest.fixture
async def served(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A rank with room for many train sessions, which the environment names as agents find it."""
    served = await serve()
    monkeypatch.delenv("ANY_AGENT_URL", raising=False)
    monkeypatch.delenv("ANY_AGENT_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{served.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", served.tenant_key)
    return served
