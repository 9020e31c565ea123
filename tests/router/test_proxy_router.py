"""The router before proxies that are named by their URLs."""

from __future__ import annotations

import asyncio
import gzip
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from aiohttp import web

from any_agent.chat import ChatFormat
from any_agent.errors import ConfigError, StartupError
from any_agent.keys import rank_of_session
from router import ProxyRouter
from tests.support.errors import fails_with
from tests.support.ports import own_port
from tests.support.proxy import HELLO, LIMIT, Proxy, config_for, running_proxy, until
from tests.support.real_parts import await_url, environment
from tests.support.router import FakeRank, Received, refusal
from tests.support.scripted_engine import ScriptedEngine

ADMIN = "operator-secret-4711"


@asynccontextmanager
async def served(router: ProxyRouter) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the router in an app that is run as `web.run_app` runs it."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", router.route_request)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with router, httpx.AsyncClient(base_url=url, timeout=LIMIT) as http:
            yield http
    finally:
        await runner.cleanup()


async def proxy_like(received: Received) -> None:
    await received.answer({"status": "ok", "rank": 0})


@pytest.fixture
async def rank() -> AsyncIterator[FakeRank]:
    rank = FakeRank()
    rank.handler = proxy_like
    await rank.start()
    yield rank
    await rank.kill()


@pytest.fixture
async def pair(
    tmp_path: Path, chat: ChatFormat, engine: ScriptedEngine, request: pytest.FixtureRequest
) -> AsyncIterator[list[Proxy]]:
    """Two ranks; with the mark's settings."""
    config = config_for(tmp_path, "server.ranks=2", *getattr(request, "param", ()))
    async with AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(
                running_proxy(config, chat, engine_url=engine.url, rank=rank)
            )
            for rank in range(2)
        ]
        for proxy in started:
            await proxy.admit(10)
        yield started


@pytest.mark.service
async def test_sessions_open_in_turn_and_stay_where_they_are(pair: list[Proxy]) -> None:
    """Behind any aiohttp server, whose handler it may be."""
    # Their order does not matter: each proxy says which rank it is.
    async with served(ProxyRouter([pair[1].url, pair[0].url + "/"])) as http:
        opened = [(await http.post("/rl/v1/start_session", json={})).json() for _ in range(4)]
        ranks = [rank_of_session(session["session_id"]) for session in opened]
        assert sorted(ranks) == [0, 0, 1, 1]
        for session in opened:
            key = session["api_key"]
            async with openai.AsyncOpenAI(base_url=http.base_url.join("v1"), api_key=key) as agent:
                answer = await agent.chat.completions.create(model="any", messages=HELLO)  # type: ignore[arg-type]
            body = {"completion_id": answer.id, "reward": 1.0}
            headers = {"Authorization": f"Bearer {key}"}
            rewarded = await http.post("/rl/v1/set_reward", json=body, headers=headers)
            assert rewarded.status_code == 200
            await http.post("/rl/v1/finalize", json={}, headers=headers)
        listed = (await http.get("/rl/v1/sessions")).json()
        assert len(listed) == 4
        forged = {"Authorization": f"Bearer sk-v1.1.{'0' * 24}.{'0' * 32}"}
        refused = await http.post("/rl/v1/finalize", json={}, headers=forged)
        assert refused.status_code == 401
        health = (await http.get("/healthz")).json()
        assert {state["state"] for state in health["ranks"].values()} == {"ready"}
        assert "any_agent_" in (await http.get("/metrics")).text


@pytest.mark.parametrize("pair", [[], [f"server.admin_key={ADMIN}"]], indirect=True)
async def test_a_granted_slot_is_brought_to_the_rank_of_an_open(pair: list[Proxy]) -> None:
    for proxy in pair:
        await proxy.admit(0)
    router = ProxyRouter([proxy.url for proxy in pair])
    async with served(router) as http:
        http.headers["Authorization"] = f"Bearer {ADMIN}"
        opened = []
        for k in range(4):
            assert (await http.post("/grant_capacity", json={})).status_code == 200
            once = {"Idempotency-Key": f"k{k}"}
            answer = await http.post("/rl/start_session", json={}, headers=once)
            assert answer.status_code == 200, answer.text
            opened.append(answer.json()["session_id"])
        # Grants went to the ranks in turn, and opens where their keys say.
        assert len(set(opened)) == 4
        assert (await http.post("/rl/start_session", json={})).status_code == 429


async def test_a_client_that_leaves_ends_what_was_begun_for_it(rank: FakeRank) -> None:
    begun = asyncio.Event()

    async def sample(received: Received) -> None:
        if received.target != "/v1/chat/completions":
            return await proxy_like(received)
        begun.set()
        await asyncio.Event().wait()

    rank.handler = sample
    async with served(ProxyRouter([rank.url])) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json={}))
        async with asyncio.timeout(LIMIT):
            await begun.wait()
            asking.cancel()
            await rank.left.wait()


async def test_an_encoded_body_goes_nowhere(rank: FakeRank) -> None:
    async with served(ProxyRouter([rank.url])) as http:
        for encoding in ("gzip", "identity, gzip", "x"):
            headers = {"Content-Encoding": encoding}
            body = gzip.compress(b"A" * 100_000)
            refused = await http.post("/v1/chat/completions", content=body, headers=headers)
            assert refusal(refused) == (415, "unsupported_encoding")
        assert not rank.received
        headers = {"Content-Encoding": "identity"}
        taken = await http.post("/v1/chat/completions", content=b"{}", headers=headers)
        assert taken.status_code == 200
        assert rank.received[-1].body == b"{}"


async def test_while_a_proxy_is_away_requests_are_told_to_come_again(rank: FakeRank) -> None:
    await rank.kill()
    router = ProxyRouter([rank.url])
    async with served(router) as http:
        for answer in await asyncio.gather(*(http.get("/rl/v1/capacity") for _ in range(4))):
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "2")
            assert answer.json()["error"]["code"] == "service_unavailable"
            assert rank.url not in answer.text
        # Nothing is left of the attempts.
        for thread in threading.enumerate():
            if thread.name.startswith("proxies"):
                await asyncio.to_thread(thread.join, LIMIT)
                assert not thread.is_alive()
        await rank.start()
        assert (await http.get("/rl/v1/capacity")).status_code == 200
        await rank.kill()

        async def away() -> bool:
            return (await http.get("/readyz")).status_code == 503

        await until(away, "the death is noticed")


async def test_a_proxy_router_closes_after_the_loop_that_used_it(rank: FakeRank) -> None:
    router = ProxyRouter([rank.url])
    await asyncio.to_thread(asyncio.run, router.opened("127.0.0.1"))
    await asyncio.wait_for(router.close(), LIMIT)


async def test_an_open_service_is_not_shown_to_others(pair: list[Proxy]) -> None:
    router = ProxyRouter([proxy.url for proxy in pair])
    with fails_with(ConfigError, "0.0.0.0", "host='127.0.0.1'"):
        await asyncio.to_thread(router.start, port=0)


@pytest.mark.service
async def test_a_router_started_by_a_script_serves_until_it_is_told_to_end(
    pair: list[Proxy],
) -> None:
    port = own_port()
    urls = [proxy.url for proxy in pair]
    script = f"from router import ProxyRouter; ProxyRouter({urls}).start('127.0.0.1', {port})"
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await asyncio.to_thread(await_url, f"{url}/readyz", process, Path("/dev/null"))
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT) as http:
            opened = await http.get("/rl/v1/start_session")
        assert opened.status_code == 200, opened.text
        process.send_signal(signal.SIGTERM)
        said, _ = await asyncio.to_thread(process.communicate, timeout=LIMIT)
        assert (process.returncode, said) == (0, f"any-agent router listening at {url}\n")
    finally:
        process.kill()
        process.wait()


async def test_urls_that_cannot_be_routed_to_are_refused(pair: list[Proxy]) -> None:
    for urls, said in (
        ([], "URLs"),
        ("http://127.0.0.1:1", "URLs"),
        (["node1:8001"], "'node1:8001'"),
    ):
        with fails_with(ConfigError, said):
            ProxyRouter(urls)
    twice = ProxyRouter(["http://a:1", "http://b:1", "http://a:1/"])
    assert twice.proxy_urls == ["http://a:1", "http://b:1"]
    with fails_with(StartupError, "http://127.0.0.1"):
        router = ProxyRouter([pair[0].url, f"http://127.0.0.1:{own_port()}"])
        await asyncio.to_thread(router.start, "127.0.0.1", 0)
    with fails_with(ConfigError, "ranks 1"):
        await asyncio.to_thread(ProxyRouter([pair[1].url]).start, "127.0.0.1", 0)
