"""What a rank tells the others of itself: while it serves, with its load, and at its end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from any_agent import presence
from any_agent.ports import listen
from any_agent.registry import Entry, Load, Registry
from proxy_ext.presence import PresentServer, entry_of
from tests.fakes.scripted_engine import ScriptedEngine
from tests.proxy_ext.proxy_lab import Proxy, until


class Rank:
    """Describes itself, with the number of the description as its version."""

    def __init__(self) -> None:
        self.told = 0

    def __call__(self) -> Entry:
        self.told += 1
        return Entry(name="rank-3", boot_id="b", url="http://x", pid=1, version=self.told)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "HEARTBEAT", 0.01)


def entry(folder: Path) -> Entry | None:
    registry = Registry(folder)
    registry.refresh()
    return registry.get("rank-3")


def version(folder: Path) -> int:
    found = entry(folder)
    return found.version if found else 0


class App:
    """An app with one call that ends when the test says so, and a record of what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.called = asyncio.Event()
        self.answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                self.events.append(event)
                await send({"type": f"lifespan.{event}.complete"})
            return
        self.called.set()
        await self.answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})


@pytest.fixture
async def app() -> AsyncIterator[App]:
    app = App()
    yield app
    app.answer.set()


async def test_a_server_is_present_from_when_it_listens_until_it_is_told_to_stop(
    tmp_path: Path, app: App
) -> None:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = PresentServer(uvicorn.Config(app, lifespan="on", log_config=None), tmp_path, Rank())
    serving = asyncio.create_task(server._serve([listener]))
    await until(lambda: version(tmp_path))
    assert app.events == ["startup"]
    async with httpx.AsyncClient() as http:
        call = asyncio.create_task(http.get(url))
        await app.called.wait()
        server.should_exit = True
        # Told while a call is still being answered, so that no new ones are sent here.
        await until(lambda: (last := entry(tmp_path)) and last.state == "stopping")
        assert not call.done()
        assert app.events == ["startup"]
        app.answer.set()
        assert (await call).text == "answer"
    await serving
    assert app.events == ["startup", "shutdown"]


async def test_a_server_that_cannot_start_was_never_present(tmp_path: Path) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed"})

    listener = listen("127.0.0.1", 0)
    server = PresentServer(uvicorn.Config(broken, lifespan="on", log_config=None), tmp_path, Rank())
    with pytest.raises(SystemExit):
        await server._serve([listener])
    listener.close()
    assert entry(tmp_path) is None


async def test_an_entry_tells_load_and_version(proxy: Proxy, engine: ScriptedEngine) -> None:
    session = await proxy.open()
    await proxy.open()
    await proxy.finished_session()
    await proxy.client.publish_version(version=7, path="/w", step=7)
    told = entry_of(proxy.service, url="http://127.0.0.1:9", boot_id="life")
    assert (told.name, told.boot_id, told.url, told.pid) == (
        "rank-0",
        "life",
        "http://127.0.0.1:9",
        os.getpid(),
    )
    assert (told.state, told.engine_url, told.version) == ("ready", engine.url, 7)
    assert told.load == Load(open=2, waiting=0, calls=0)
    release = engine.hold(at=1)
    call = asyncio.create_task(proxy.complete(session["api_key"]))
    await until(lambda: entry_of(proxy.service, url="", boot_id="").load.calls == 1)
    release.set()
    await call
    await proxy.admit(0)
    waits = asyncio.create_task(proxy.open(wait=30))
    await until(lambda: entry_of(proxy.service, url="", boot_id="").load.waiting == 1)
    waits.cancel()
