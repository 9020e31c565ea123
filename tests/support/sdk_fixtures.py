from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest

from any_agent.auth.key_store import create_key
from any_agent.launcher.trial import trial_dir
from tests.support.proxy import Proxy
from tests.support.proxy_fixtures import Start

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


@pytest.fixture
def serve(start: Start) -> Serve:
    """Start a rank on the scripted engine; settings by dotted name, `slots` of train sessions."""

    async def make(*settings: str, slots: int = 1000) -> Served:
        proxy = await start(f"server.admin_key={ADMIN}", *settings, admit=slots or None)
        key, _ = create_key(trial_dir(proxy.service.config).keys, "tenant", tenant="agents")
        return Served(proxy, key)

    return make


@pytest.fixture
async def served(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A rank with room for many train sessions, which the environment names as agents find it."""
    served = await serve()
    monkeypatch.delenv("ANY_AGENT_URL", raising=False)
    monkeypatch.delenv("ANY_AGENT_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{served.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", served.tenant_key)
    return served
