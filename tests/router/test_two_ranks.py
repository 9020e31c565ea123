"""Two real proxies behind a router, in one process, over scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from any_agent.auth.key_store import create_key
from any_agent.chat import ChatFormat
from any_agent.client.rl_client import RLClient
from any_agent.config import Config
from any_agent.errors import Forbidden, NotFound
from any_agent.keys import rank_of_session
from any_agent.launcher.trial import trial_dir
from any_agent.protocol.rl import SessionStarted
from any_agent.protocol.training import Rejection
from any_agent.record import unpack_trajectories
from any_agent.rundir.registry import Heartbeat
from proxy_ext.server import entry_of
from proxy_ext.sessions import task_advice
from tests.support.errors import fails_with
from tests.support.ports import own_port
from tests.support.proxy import HELLO, LIMIT, Proxy, config_for, running_proxy, until
from tests.support.router import bearer, serving
from tests.support.scripted_engine import ScriptedEngine


@dataclass
class Pair:
    """A router before two ranks."""

    config: Config
    chat: ChatFormat
    engines: list[ScriptedEngine]
    port: int
    proxies: dict[int, Proxy] = field(default_factory=dict)
    stacks: dict[str, AsyncExitStack] = field(default_factory=dict)
    """What ends a part, by its name."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start_rank(self, rank: int) -> None:
        stack = self.stacks[f"rank-{rank}"] = AsyncExitStack()
        context = running_proxy(
            self.config, self.chat, engine_url=self.engines[rank].url, rank=rank
        )
        proxy = self.proxies[rank] = await stack.enter_async_context(context)
        entry = partial(entry_of, proxy.service, url=proxy.url, boot_id="boot")
        heartbeat = Heartbeat(trial_dir(self.config).registry, entry)
        await heartbeat.begin()
        stack.push_async_callback(heartbeat.end)

    async def start_router(self) -> None:
        stack = self.stacks["router"] = AsyncExitStack()
        await stack.enter_async_context(serving(self.config, self.port))

    async def end(self, part: str) -> None:
        await self.stacks.pop(part).aclose()

    async def admit(self, each: int) -> None:
        for proxy in self.proxies.values():
            await proxy.admit(each)


@asynccontextmanager
async def running_pair(root: Path, chat: ChatFormat, *settings: str) -> AsyncIterator[Pair]:
    config = config_for(root, "server.ranks=2", *settings)
    trial_dir(config).create()
    engines = [ScriptedEngine(decode=chat.decode) for _ in range(2)]
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.serve())
        pair = Pair(config, chat, engines, own_port())
        try:
            for rank in range(2):
                await pair.start_rank(rank)
            await pair.start_router()
            yield pair
        finally:
            # The router before the ranks.
            for part in sorted(pair.stacks, reverse=True):
                await pair.end(part)


@pytest.fixture
async def pair(tmp_path: Path, chat: ChatFormat) -> AsyncIterator[Pair]:
    async with running_pair(tmp_path, chat) as pair:
        await pair.admit(100)
        yield pair


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[RLClient]:
    async with RLClient(pair.url, timeout=LIMIT, trust_env=False) as client:
        yield client


@pytest.fixture
async def http(pair: Pair) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=pair.url, timeout=LIMIT) as http:
        yield http


async def opened(http: httpx.AsyncClient, key: str | None = None, **fields: Any) -> SessionStarted:
    """An open without an Idempotency-Key, which would choose its rank: each gets one in turn."""
    response = await http.post("/rl/v1/start_session", json=fields, headers=bearer(key))
    assert response.status_code == 200, response.text
    return SessionStarted.model_validate_json(response.content)


async def finished(client: RLClient, http: httpx.AsyncClient) -> str:
    """A session of one call and a reward."""
    session = await opened(http)
    await call(client, session)
    await client.finalize(session.api_key, 1.0)
    return session.session_id


async def call(client: RLClient, session: SessionStarted) -> None:
    body = {"model": "m", "messages": HELLO, "max_tokens": 4}
    await client.request("POST", "/chat/completions", body, key=session.api_key, base="/v1")


# -- calls -------------------------------------------------------------------------------------


async def test_a_call_that_openais_sdk_repeats_after_a_break_is_sampled_once(
    pair: Pair, http: httpx.AsyncClient
) -> None:
    """The router ends amid a call: the SDK asks the next one, and its call was sampled once."""
    session = await opened(http)
    rank = rank_of_session(session.session_id) or 0
    engine = pair.engines[rank]
    go_on = engine.hold(2)
    live = pair.proxies[rank].service.sessions.live[session.session_id]
    async with openai.AsyncOpenAI(
        api_key=session.api_key, base_url=f"{pair.url}/v1", max_retries=10, timeout=60
    ) as sdk:
        asked = asyncio.create_task(
            sdk.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=8
            )
        )
        await until(lambda: engine.running, "the engine samples")
        await pair.end("router")
        await until(lambda: any(c.vacant for c in live.calls), "its client is gone")
        await pair.start_router()
        await until(lambda: not any(c.vacant for c in live.calls), "the SDK takes the call up")
        go_on.set()
        done = await asked
    (recorded,) = await pair.proxies[rank].recorded(session.session_id)
    assert done.id == recorded.id
    assert len(engine.requests) == 1


async def test_sessions_are_leased_exported_acknowledged_and_vetoed_over_ranks(
    pair: Pair, client: RLClient, http: httpx.AsyncClient
) -> None:
    ids = [await finished(client, http) for _ in range(4)]
    assert (await client.get_capacity()).buffered == 4
    listed = (await http.get("/rl/v1/sessions")).json()
    assert [info["session_id"] for info in listed] == ids[::-1]
    leased: list[str] = []
    while len(leased) < 4:
        packed = await client.lease(owner="me", wait=10)
        assert packed is not None
        leased += [t.session_id for t in unpack_trajectories(packed)]
    assert sorted(leased) == sorted(ids)
    assert await client.lease(owner="me", wait=0) is None
    assert await client.ack(owner="me", trained=ids[:3], rejected=[]) == 3
    rejected = [Rejection(session_id=ids[3], reason="stale")]
    assert await client.ack(owner="me", trained=ids[:3], rejected=rejected) == 1
    assert (await client.get_capacity()).buffered == 0
    for session_id in ids[:3]:
        assert (await client.session_info(session_id)).state == "trained"
    others = [await finished(client, http) for _ in range(2)]
    exported = await http.post("/rl/v1/export_trajectories", json={"session_ids": others})
    assert list(exported.json()["trajectories"]) == others
    one, two = [await finished(client, http) for _ in range(2)]
    vetoed = await client.veto_session(one, "by a test")
    assert (vetoed.state, vetoed.reason) == ("rejected", "vetoed: by a test")
    deleted = await client.delete_session(two)
    assert (deleted.state, deleted.content) == ("rejected", "deleted")


async def test_the_next_task_is_chosen_by_what_all_ranks_know(
    pair: Pair, client: RLClient, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_advice, "KEPT_SECONDS", 0.0)
    with fails_with(NotFound, "?task_id=", code="no_known_task"):
        await client.next_task()
    homes: list[int | None] = []
    for number, name in enumerate("abdcfe"):
        # Groups with names have homes of their own, whatever their task is.
        fields = {"task_id": "t", "group_id": name, "group_size": 1}
        session = await opened(http, **fields)
        await call(client, session)
        await client.finalize(session.api_key, 1.0)
        homes.append(rank_of_session(session.session_id))
        packed = await client.lease(owner="me", wait=10)
        assert packed is not None
        alike = Rejection(session_id=session.session_id, reason="zero_variance")
        trained, rejected = ([], [alike]) if number > 3 else ([session.session_id], [])
        await client.ack(owner="me", trained=trained, rejected=rejected, step=number)
    assert homes == [0, 1] * 3
    found = await client.next_task()
    assert (found.task_id, found.sessions, found.mean_reward) == ("t", 6, 1.0)
    assert (found.verdict, found.weight) == ("taught_nothing", 0.25)
    found = await client.next_task(["t", "new"])
    assert {one.task_id: one.sessions for one in found.candidates} == {"t": 6, "new": 0}
    # A rank that is away has no part, and is named.
    await pair.end("rank-1")
    response = await http.get("/rl/v1/tasks/next?task_id=t")
    assert response.headers["x-any-agent-unreachable"] == "1"
    assert response.json()["sessions"] == homes.count(0)


async def test_a_tenant_sees_its_own_over_all_ranks(tmp_path: Path, chat: ChatFormat) -> None:
    async with (
        running_pair(tmp_path, chat, "server.admin_key=operator-secret") as pair,
        httpx.AsyncClient(base_url=pair.url, timeout=LIMIT, trust_env=False) as http,
    ):
        await pair.admit(10)
        path = trial_dir(pair.config).keys
        keys = {name: create_key(path, "tenant", tenant=name)[0] for name in ("alice", "bob")}
        own: dict[str, set[str]] = {}
        for name, key in keys.items():
            own[name] = {(await opened(http, key)).session_id for _ in range(4)}
            assert {rank_of_session(id) for id in own[name]} == {0, 1}
        own[""] = own["alice"] | own["bob"]
        for name, key in {**keys, "": "operator-secret"}.items():
            answer = await http.get("/rl/v1/sessions", headers=bearer(key))
            assert {session["session_id"] for session in answer.json()} == own[name]
        async with RLClient(pair.url, admin_key=keys["bob"], trust_env=False) as client:
            with pytest.raises(Forbidden):
                await client.get_capacity()
            for id in own["alice"]:
                with pytest.raises(NotFound):
                    await client.session_info(id)
