"""The embedded engine's key, and the hosts that it answers to without one."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from any_agent.auth.engine_key import read_key_file, write_key_file
from any_agent.engine import SGLangEngine
from any_agent.engine.embedded.__main__ import main
from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.engine.embedded.server import EngineServer
from any_agent.engine.sglang.probe import probe_engine
from any_agent.errors import ConfigError, EngineUnavailable, StartupError, TrainingError
from tests.support.engine.embedded import Serve, request
from tests.support.errors import fails_with
from trainer.sync.engine_client import EngineClient, control_session

KEY = "sk-engine." + 64 * "a"
WRONG: tuple[dict[str, str], ...] = (
    {},
    {"Authorization": "Bearer sk-engine." + 64 * "b"},
    {"Authorization": "Bearer"},
    {"Authorization": KEY},
    {"Authorization": f"Basic {KEY}"},
    {"X-Api-Key": KEY},
)


@pytest.fixture
async def locked(engine: EmbeddedEngine, serve: Serve) -> AsyncIterator[str]:
    yield await serve(engine, key=KEY)


def routes(engine: EmbeddedEngine) -> list[tuple[str, str]]:
    app = EngineServer(engine).app()
    found = {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource}
    assert len(found) > 20
    return sorted(found)


@pytest.mark.parametrize("headers", WRONG)
async def test_every_route_but_health_needs_the_key(
    engine: EmbeddedEngine, locked: str, headers: dict[str, str]
) -> None:
    async with aiohttp.ClientSession(locked, headers=headers) as http:
        for method, path in [*routes(engine), ("GET", "/"), ("POST", "/nothing")]:
            async with http.request(method, path, json={} if method == "POST" else None) as answer:
                assert answer.status == (200 if path == "/health" else 401), (method, path)
                assert not (path == "/health" and await answer.read()), "it tells something"
        async with http.post("/generate", data=b"[") as answer:
            assert answer.status == 401, "the key comes before the body"
    assert engine.variant.paused is None


async def test_every_client_sends_the_engines_key(locked: str) -> None:
    client = SGLangEngine(locked, decode=lambda _: "", key=KEY)
    other = SGLangEngine(locked, decode=lambda _: "", key="another", update_wait=0.2)
    try:
        chunks = [c async for c in client.generate(request("r", [5, 6, 7]), stream=True)]
        assert sum(len(chunk.output_ids) for chunk in chunks) == 8
        await client.pause()
        await client.resume(0)
        with pytest.raises(EngineUnavailable):
            await other.agenerate(request("r", [5]))
        for use in (other.info, other.pause):
            with fails_with(ConfigError, "engine.key"):
                await use()
    finally:
        await client.close()
        await other.close()
    async with probe_engine(locked, key=KEY) as probe:
        assert (await probe.info())["model_path"]
    async with control_session(KEY) as http, control_session(None) as without:
        await EngineClient(0, locked, http, timeout=30).fetch_info()
        with fails_with(TrainingError, "engine.key"):
            await EngineClient(0, locked, without, timeout=30).fetch_info()


async def test_without_a_key_only_names_of_this_machine_are_answered(
    engine: EmbeddedEngine, serve: Serve, locked: str
) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Host": "node-7:30000"}
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{locked}/model_info", headers=headers) as answer,
    ):
        assert answer.status == 200, "with a key others are"
    url = await serve(engine)
    port = url.rpartition(":")[2]
    async with aiohttp.ClientSession(url) as http:
        for host, status in (
            (f"127.0.0.1:{port}", 200),
            (f"localhost:{port}", 200),
            (f"[::1]:{port}", 200),
            (f"evil.example.org:{port}", 403),
            (f"127.0.0.1.evil.example.org:{port}", 403),
            ("10.0.0.1", 403),
        ):
            async with http.get("/model_info", headers={"Host": host}) as answer:
                assert answer.status == status, host


def test_a_key_file_is_private_and_a_damaged_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "engine-key.yaml"
    write_key_file(path, KEY)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key_file(path) == KEY
    for text in ("", "[]", "{}", '{"api-key": ""}', '{"api-key": 7}', "no"):
        path.write_text(text)
        with fails_with(StartupError, str(path)):
            read_key_file(path)
    path.write_text(json.dumps({"api-key": "theirs"}))
    assert read_key_file(path) == "theirs"


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0"])
def test_another_address_needs_a_key_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    """Before it loads anything: whoever reaches an engine may change its weights."""
    monkeypatch.setattr("sys.argv", ["engine", "--model-path", "/none", "--host", host])
    interval = sys.getswitchinterval()
    assert main() == 2
    sys.setswitchinterval(interval)
    assert ("--key-file" if host == "10.0.0.1" else host) in capsys.readouterr().err
