"""A cloud in the test's own loop, whose runs are processes without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from any_agent.config.cloud import load_cloud
from any_agent.runtime.ports import accept_on, port_of, reserve
from router.cloud.app import Cloud, running_cloud

ADMIN = "the-operators-own-key"


@dataclass
class Client:
    """A cloud's routes, called with a key."""

    cloud: Cloud
    url: str
    http: httpx.AsyncClient
    root: Path

    async def ask(
        self, method: str, path: str, key: str = "", body: Any = None, **headers: str
    ) -> httpx.Response:
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return await self.http.request(method, path, headers=headers, json=body)

    async def account(self, name: str) -> str:
        """A new account's key."""
        made = await self.ask("POST", "/rl/v1/accounts", ADMIN, {"name": name})
        assert made.status_code == 201, made.text
        return str(made.json()["api_key"])

    async def run(self, key: str, experiment: str = "exp", **more: Any) -> dict[str, Any]:
        """A new run of an account."""
        made = await self.ask("POST", "/rl/v1/runs", key, {"experiment": experiment, **more})
        assert made.status_code == 201, made.text
        return dict(made.json())

    async def state(self, key: str, id: str) -> str:
        return str((await self.ask("GET", f"/rl/v1/runs/{id}", key)).json()["state"])

    async def reason(self, key: str, id: str) -> str:
        return str((await self.ask("GET", f"/rl/v1/runs/{id}", key)).json()["reason"])

    def folder(self, run: dict[str, Any]) -> Path:
        return self.root / str(run["account"]) / str(run["experiment"]) / str(run["trial"])


Opening = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opening:
    """Open a cloud in ``tmp_path`` with these settings."""
    monkeypatch.setattr("router.cloud.launching.PROGRAM", ("tests.support.cloud_run",))

    @asynccontextmanager
    async def open_cloud(**settings: Any) -> AsyncIterator[Client]:
        plain = {
            "root": str(tmp_path / "runs"),
            "models": {"tiny": {"model.path": str(tmp_path), "server.ranks": 1}},
            "presets": {"grpo": {"train": {"steps": 7}}},
            "default": {"model": "tiny", "preset": "grpo"},
            "places": 4,
            **settings,
        }
        path = tmp_path / "cloud.yaml"
        path.write_text(yaml.safe_dump(plain))
        config = load_cloud(path, {"ANY_AGENT_SERVER__ADMIN_KEY": ADMIN})
        with reserve("127.0.0.1", 0) as listener:
            accept_on(listener, 64)
            url = f"http://127.0.0.1:{port_of(listener)}"
            async with (
                running_cloud(config, listener, url) as cloud,
                httpx.AsyncClient(base_url=url, timeout=90, trust_env=False) as http,
            ):
                yield Client(cloud, url, http, tmp_path / "runs")

    return open_cloud
