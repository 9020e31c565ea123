"""What a rank tells the others of itself: while it serves, with its load, and at its end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from any_agent.rundir.registry import PartLoad
from any_agent.runtime.ports import reserve
from proxy_ext.server import DrainingServer, entry_of
from tests.support.errors import fails_with
from tests.support.presence import Part, entry, quick, version
from tests.support.proxy import Proxy, until
from tests.support.scripted_engine import ScriptedEngine

__all__ = ["quick"]
pytestmark = pytest.mark.usefixtures("quick")


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
        await self.answered(send)

    async def answered(self, send: Any) -> None:
        await self.answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})


@pytest.fixture
async def app() -> AsyncIterator[App]:
    app = App()
    yield app
    app.answer.set()


class Present:
    """A server that serves an app, and is registered in a folder."""

    def __init__(
        self,
        app: Any,
        folder: Path,
        *,
        drain_timeout: float = 30,
        lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        async def drain() -> None:
            pass

        config = uvicorn.Config(app, lifespan="on", log_config=None, timeout_graceful_shutdown=1)
        self.server = DrainingServer(
            *(config, folder, Part(), drain),
            drain_timeout=drain_timeout,
            lost=lost,
            on_lost=lambda _: None,
        )
        self.listener = reserve("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.folder = folder

    async def started(self) -> DrainingServer:
        self.ended = asyncio.create_task(self.server.serve([self.listener]))
        await until(lambda: self.server.started and version(self.folder))
        return self.server

    async def told_to_stop(self) -> None:
        """Wait until others see that it stops."""
        await until(lambda: (last := entry(self.folder)) and last.state == "stopping")


async def test_a_server_ends_at_once_when_another_process_carries_the_rank(
    tmp_path: Path, app: App
) -> None:
    reasons: list[str | None] = [None]
    here = Present(app, tmp_path, lost=lambda: reasons[0])
    server = await here.started()
    assert server.lost is None
    reasons[0] = "another process has it"
    await asyncio.wait_for(here.ended, 20)
    # The rank's parts, which knew it, are gone by now.
    assert server.lost == "another process has it"


async def test_a_server_is_registered_until_sigterm_and_then_drains(
    tmp_path: Path, app: App
) -> None:
    """And then ends well: uvicorn would raise the signal again, and the process die of it."""
    here = Present(app, tmp_path)
    server = await here.started()
    async with httpx.AsyncClient() as http:
        call = asyncio.create_task(http.get(here.url))
        await app.called.wait()
        server.handle_exit(signal.SIGTERM, None)
        await here.told_to_stop()
        assert not call.done() and app.events == ["startup"]
        # It goes on beating, so that nobody takes it for dead meanwhile.
        beats = version(tmp_path)
        await until(lambda: version(tmp_path) > beats + 2)
        # A request that comes now is answered, too.
        late = asyncio.create_task(http.get(here.url))
        app.answer.set()
        assert (await call).text == (await late).text == "answer"
    await here.ended
    assert app.events == ["startup", "shutdown"]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_server_at_once(
    tmp_path: Path, app: App, second: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    here = Present(app, tmp_path)
    server = await here.started()
    async with httpx.AsyncClient(timeout=60) as http:
        call = asyncio.create_task(http.get(here.url))
        await app.called.wait()
        server.handle_exit(signal.SIGTERM, None)
        server.handle_exit(second, None)
        cut = await call
    assert (cut.status_code, cut.json()["error"]["code"]) == (503, "draining")
    assert int(cut.headers["retry-after"]) >= 1
    await here.ended
    assert app.events == ["startup", "shutdown"]
    assert "Traceback" not in caplog.text


async def test_an_answer_under_way_is_cut_off_and_not_ended_as_if_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Endless(App):
        async def answered(self, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            await asyncio.Event().wait()

    here = Present(Endless(), tmp_path)
    server = await here.started()
    async with httpx.AsyncClient(timeout=60) as http:
        with fails_with(httpx.RemoteProtocolError, "incomplete"):
            async with http.stream("GET", here.url) as response:
                async for _ in response.aiter_bytes():
                    server.handle_exit(signal.SIGINT, None)
    await here.ended
    assert "Traceback" not in caplog.text


async def test_a_request_that_comes_at_the_cut_is_answered(
    tmp_path: Path, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Present(app, tmp_path)
    server = await here.started()
    reader, writer = await asyncio.open_connection(*here.listener.getsockname())
    connections: set[Any] = server.server_state.connections
    await until(lambda: len(connections) == 1)
    (connection,) = connections
    wait = server.wait_until_idle

    async def then_comes_one(seconds: float) -> None:
        await wait(seconds)
        request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        asyncio.get_running_loop().call_soon(connection.data_received, request)

    monkeypatch.setattr(server, "wait_until_idle", then_comes_one)
    server.should_exit = True
    async with asyncio.timeout(10):
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
    await here.ended
    writer.close()


async def test_a_client_that_never_reads_is_awaited_for_so_long(tmp_path: Path) -> None:
    class Torrent(App):
        async def answered(self, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                part = bytes(1 << 20)
                await send({"type": "http.response.body", "body": part, "more_body": True})

    app = Torrent()
    here = Present(app, tmp_path, drain_timeout=0.2)
    server = await here.started()
    _, writer = await asyncio.open_connection(*here.listener.getsockname(), limit=1)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await app.called.wait()
    server.handle_exit(signal.SIGTERM, None)
    async with asyncio.timeout(30):
        await here.ended
    assert app.events == ["startup", "shutdown"]
    writer.transport.abort()


async def test_a_server_that_cannot_start_was_never_present(tmp_path: Path) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed"})

    here = Present(broken, tmp_path)
    with pytest.raises(SystemExit):
        await here.server.serve([here.listener])
    here.listener.close()
    assert entry(tmp_path) is None


async def test_the_registry_entry_of_a_rank_tells_load_and_version(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
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
    assert told.load == PartLoad(open=2, waiting=0, calls=0)
    release = engine.hold(at=1)
    call = asyncio.create_task(proxy.complete(session["api_key"]))
    await until(lambda: entry_of(proxy.service, url="", boot_id="").load.calls == 1)
    release.set()
    await call
    await proxy.admit(0)
    waits = asyncio.create_task(proxy.open(wait=30))
    await until(lambda: entry_of(proxy.service, url="", boot_id="").load.waiting == 1)
    waits.cancel()
