"""A real proxy app under a real uvicorn, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from any_agent.chat import ChatFormat
from any_agent.client.rl_client import RLClient
from any_agent.config import Config, load_config
from any_agent.keys import KeySigner
from any_agent.launcher.trial import trial_dir
from any_agent.record import unpack_trajectories
from any_agent.types import Trajectory
from proxy_ext.app import create_app
from proxy_ext.in_process import RankApp
from proxy_ext.service import RankService
from proxy_ext.web.exchange import ClientConnection
from tests.support.redis_server import JOURNAL
from tests.support.waiting import LIMIT as LIMIT
from tests.support.waiting import until as until

HELLO = [{"role": "user", "content": "Say a number."}]


def noticed_hang_up(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once the proxy has noticed that a client left."""
    noticed = asyncio.Event()
    watch = ClientConnection.__init__

    def watch_and_tell(
        client: ClientConnection, request: Request, on_leave: Callable[[], object]
    ) -> None:
        def told() -> None:
            on_leave()
            noticed.set()

        watch(client, request, told)

    monkeypatch.setattr(ClientConnection, "__init__", watch_and_tell)
    return noticed


def turned_away(response: httpx.Response, status: int, code: str) -> int:
    """Check a refusal; the seconds until the next try."""
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert status in (429, 503, 507)
    seconds = int(response.headers["Retry-After"])
    assert 1 <= seconds <= 60
    return seconds


def config_for(root: Path, *settings: str) -> Config:
    base = [f"root={root}", "sessions.group_size=2", "rollout.batch_size=8"]
    return load_config(None, [*base, *JOURNAL.settings(root), *settings], {})


def litellm_stand_in() -> Starlette:
    """Answers the paths that LiteLLM has, so that the allowlist has something to hide."""

    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"litellm {request.url.path}")

    paths = ("/health/liveliness", "/health/liveness", "/settings", "/routes", "/debug/memory")
    return Starlette(routes=[Route(path, answer) for path in paths])


def our_app() -> Any:
    """The app that is served, without LiteLLM's in front; not started."""
    front = create_app(
        Config(),
        None,  # type: ignore[arg-type]
        rank=0,
        engine_url="http://127.0.0.1:1",
        public_url="http://127.0.0.1:2",
        training=True,
    )
    return front.ours.app  # type: ignore[attr-defined]


class Proxy:
    """A running proxy: its URL, its parts, and the calls that tests make."""

    def __init__(
        self, service: RankService, front: RankApp, url: str, admin_key: str | None
    ) -> None:
        self.service = service
        self.front = front
        self.url = url
        admin = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self.http = httpx.AsyncClient(base_url=url, timeout=LIMIT, headers=admin)
        self.client = RLClient(url, admin_key=admin_key, timeout=LIMIT, retry_for=0.2)

    async def close(self) -> None:
        await self.http.aclose()
        await self.client.close()

    async def admit(self, limit: int, *, owner: str = "trainer", **fields: Any) -> dict[str, Any]:
        body = {"limit": limit, "ttl": 60, "owner": owner, **fields}
        response = await self.http.put("/rl/v1/capacity", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def capacity(self) -> dict[str, Any]:
        return dict((await self.http.get("/rl/v1/capacity")).json())

    async def open(self, **fields: Any) -> dict[str, Any]:
        response = await self.http.post("/rl/v1/start_session", json=fields)
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def post(
        self, path: str, body: Any, key: str | None = None, **headers: str
    ) -> httpx.Response:
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers["content-type"] = "application/json"
        return await self.http.post(path, content=content, headers=headers)

    async def call(
        self, key: str | None, messages: Sequence[dict[str, Any]] = HELLO, **fields: Any
    ) -> httpx.Response:
        body = {"model": "gpt-4o", "messages": list(messages), "max_tokens": 8, **fields}
        return await self.post("/v1/chat/completions", body, key)

    async def complete(
        self, key: str, messages: Sequence[dict[str, Any]] = HELLO, **fields: Any
    ) -> dict[str, Any]:
        response = await self.call(key, messages, **fields)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def end_ttl(self, session: dict[str, Any]) -> None:
        """Let a session's ttl run out now."""
        live = self.service.sessions.live[session["session_id"]]
        live.opened -= live.expires - time.monotonic()
        self.service.sessions.watch(live)

    async def stream(
        self, key: str, messages: Sequence[dict[str, Any]] = HELLO, **fields: Any
    ) -> tuple[list[dict[str, Any]], bool]:
        """The events of a streamed call, and whether [DONE] came."""
        body = {"model": "gpt-4o", "messages": list(messages), "max_tokens": 8, "stream": True}
        events: list[dict[str, Any]] = []
        async with self.http.stream(
            "POST",
            "/v1/chat/completions",
            json=body | fields,
            headers={"Authorization": f"Bearer {key}"},
        ) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return events, True
                if line.startswith("data: "):
                    events.append(orjson.loads(line.removeprefix("data: ")))
        return events, False

    async def finished_session(self, reward: float = 1.0, **fields: Any) -> dict[str, Any]:
        """A session with one call, finalized."""
        session = await self.open(**fields)
        await self.complete(session["api_key"])
        response = await self.post("/rl/v1/finalize", {"final_reward": reward}, session["api_key"])
        assert response.status_code == 200, response.text
        return session

    async def lease(self, *, owner: str = "trainer", wait: float = 0.0) -> list[Trajectory]:
        packed = await self.client.lease(owner=owner, wait=wait)
        return unpack_trajectories(packed) if packed is not None else []

    async def export(self, *session_ids: str, **fields: Any) -> dict[str, Any]:
        """Rows by session and interaction."""
        body = {"session_ids": list(session_ids), **fields}
        response = await self.http.post("/rl/v1/export_trajectories", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json()["trajectories"])

    async def recorded(self, session_id: str) -> list[Any]:
        """A session's interactions, from the journal."""
        stored = await self.service.journal.interactions(session_id)
        return [one.interaction for one in stored]


@asynccontextmanager
async def running_proxy(
    config: Config,
    chat: ChatFormat,
    *,
    engine_url: str,
    rank: int = 0,
    training: bool = True,
    send_buffer: int | None = None,
    **fields: Any,
) -> AsyncIterator[Proxy]:
    # asyncio sends small packets at once (TCP_NODELAY) only where the protocol is named: else each
    # request waits 40 ms for an acknowledgement.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    if send_buffer is not None:
        # Of the accepted connections: with a small one a client that reads nothing is felt early.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = create_app(
        config,
        chat,
        rank=rank,
        engine_url=engine_url,
        public_url=url,
        training=training,
        **fields,
    )
    options = uvicorn.Config(
        app,
        lifespan="on",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=1,
        # On a busy machine a client may use a connection just as its end is due.
        timeout_keep_alive=int(LIMIT),
    )
    server = uvicorn.Server(options)
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started:
            assert not task.done(), "the proxy did not start"
            await asyncio.sleep(0.005)
        key = config.server.admin_key
        proxy = Proxy(app.service, app, url, key.get_secret_value() if key else None)
        try:
            yield proxy
        finally:
            await proxy.close()
    finally:
        server.should_exit = True
        await task
        listener.close()


def signer(proxy: Proxy) -> KeySigner:
    """What signs the keys of a proxy under test."""
    return KeySigner(trial_dir(proxy.service.config).signing_secret())
