"""Two real proxies behind a router, in one process, over scripted engines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

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
from any_agent.rundir.registry import publish
from any_agent.types import SessionState
from proxy_ext.server import entry_of
from tests.support.ports import own_port
from tests.support.proxy import HELLO, LIMIT, Proxy, config_for, running_proxy, until
from tests.support.router import serving
from tests.support.scripted_engine import ScriptedEngine

T = TypeVar("T")
Start: TypeAlias = Callable[..., Awaitable["Pair"]]


@dataclass
class Pair:
    """A router before two ranks."""

    config: Config
    chat: ChatFormat
    engines: list[ScriptedEngine]
    port: int
    proxies: dict[int, Proxy]
    stacks: dict[str, AsyncExitStack]
    """What ends a part, by its name."""
    boots: itertools.count[int]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start_rank(self, rank: int) -> None:
        stack = self.stacks[f"rank-{rank}"] = AsyncExitStack()
        context = running_proxy(
            self.config, self.chat, engine_url=self.engines[rank].url, rank=rank
        )
        self.proxies[rank] = await stack.enter_async_context(context)
        boot = f"boot-{next(self.boots)}"
        self._tell(rank, boot)
        stack.callback(asyncio.create_task(self._beat(rank, boot)).cancel)

    async def _beat(self, rank: int, boot: str) -> None:
        while True:
            await asyncio.sleep(0.2)
            self._tell(rank, boot)

    def _tell(self, rank: int, boot: str) -> None:
        proxy = self.proxies[rank]
        entry = entry_of(proxy.service, url=proxy.url, boot_id=boot)
        publish(trial_dir(self.config).registry, entry)

    async def start_router(self) -> None:
        stack = self.stacks["router"] = AsyncExitStack()
        await stack.enter_async_context(serving(self.config, self.port))

    async def end(self, part: str) -> None:
        await self.stacks.pop(part).aclose()

    async def admit(self, each: int) -> None:
        for proxy in self.proxies.values():
            await proxy.admit(each)


@asynccontextmanager
async def running_pair(
    root: Path, chat: ChatFormat, *settings: str, engines: int = 2
) -> AsyncIterator[Pair]:
    """``engines``: more than two are for ranks that a test starts later."""
    config = config_for(root, "server.ranks=2", *settings)
    trial_dir(config).create()
    scripted = [ScriptedEngine(decode=chat.decode) for _ in range(engines)]
    async with AsyncExitStack() as stack:
        for engine in scripted:
            await stack.enter_async_context(engine.serve())
        pair = Pair(config, chat, scripted, own_port(), {}, {}, itertools.count())
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
async def start(tmp_path: Path, chat: ChatFormat) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def make(*settings: str) -> Pair:
            return await stack.enter_async_context(running_pair(tmp_path, chat, *settings))

        yield make


@pytest.fixture
async def pair(start: Start) -> Pair:
    pair = await start()
    await pair.admit(100)
    return pair


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[RLClient]:
    async with RLClient(pair.url, timeout=LIMIT, trust_env=False) as client:
        yield client


@pytest.fixture
async def http(pair: Pair) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=pair.url, timeout=LIMIT) as http:
        yield http


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt-4o", "messages": HELLO, "max_tokens": 4, **fields}


async def call(http: httpx.AsyncClient, key: str) -> str:
    """One model call; the session that it was recorded in."""
    response = await http.post(
        "/v1/chat/completions", json=body(), headers={"Authorization": f"Bearer {key}"}
    )
    assert response.status_code == 200, response.text
    return response.headers["x-any-agent-session"]


async def opened(http: httpx.AsyncClient, **fields: Any) -> SessionStarted:
    """An open without an Idempotency-Key, which each rank gets in turn."""
    response = await http.post("/rl/v1/start_session", json=fields)
    assert response.status_code == 200, response.text
    return SessionStarted.model_validate_json(response.content)


# -- sessions ----------------------------------------------------------------------------------


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


# -- the operator and the trainer --------------------------------------------------------------


async def finished(client: RLClient, http: httpx.AsyncClient, **fields: Any) -> str:
    session = await opened(http, **fields)
    await call(http, session.api_key)
    await client.finalize(session.api_key, 1.0)
    return session.session_id


async def test_lease_export_and_ack_over_ranks(
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


async def test_a_tenant_sees_its_own_over_all_ranks(tmp_path: Path, chat: ChatFormat) -> None:
    async with running_pair(tmp_path, chat, "server.admin_key=operator-secret") as pair:
        await pair.admit(10)
        await tenants_of(pair)


async def tenants_of(pair: Pair) -> None:
    path = trial_dir(pair.config).keys
    keys = {name: create_key(path, "tenant", tenant=name)[0] for name in ("alice", "bob")}
    opened: dict[str, set[str]] = {}
    for name, key in keys.items():
        opened[name] = {await session_of(pair, key) for _ in range(4)}
        assert {rank_of_session(id) for id in opened[name]} == {0, 1}
        async with RLClient(pair.url, admin_key=key, trust_env=False) as client:
            with pytest.raises(Forbidden):
                await client.get_capacity()
    async with httpx.AsyncClient(base_url=pair.url, timeout=LIMIT, trust_env=False) as http:
        for name, key in {**keys, "": "operator-secret"}.items():
            answer = await http.get("/rl/v1/sessions", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            seen = {session["session_id"] for session in answer.json()}
            assert seen == (opened[name] if name else opened["alice"] | opened["bob"])
    async with RLClient(pair.url, admin_key=keys["bob"], trust_env=False) as client:
        for id in opened["alice"]:
            with pytest.raises(NotFound):
                await client.session_info(id)


async def session_of(pair: Pair, key: str) -> str:
    """A new session, opened without an idempotency key, which would choose its rank."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=pair.url, timeout=LIMIT, trust_env=False) as http:
        answer = await http.post("/rl/v1/start_session", json={}, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["session_id"])


async def judged(client: RLClient, pair: Pair) -> SessionStarted:
    """A session with one call that awaits its reward, kept alive on the way."""
    session = await client.start_session()
    assert (await client.heartbeat(session)).session_id == session.session_id
    async with httpx.AsyncClient(base_url=pair.url, timeout=LIMIT) as http:
        response = await http.post(
            "/v1/chat/completions",
            json={"model": "m", "messages": HELLO, "max_tokens": 4},
            headers={"authorization": f"Bearer {session.api_key}"},
        )
    assert response.status_code == 200, response.text
    await client.finalize(session.api_key, await_reward=True)
    await client.set_reward(session.api_key, {"correct": 1})
    assert (await client.finalize(session.api_key)).state == "finalized"
    return session


async def test_requests_that_name_a_session_take_effect_at_its_own_rank(pair: Pair) -> None:
    async with RLClient(pair.url, timeout=LIMIT, retry_for=5) as client:
        sessions: list[SessionStarted] = []
        ranks: list[int | None] = []
        # The key of each open decides the rank, by chance.
        while len(sessions) < 3 or (set(ranks) != {0, 1} and len(sessions) < 64):
            sessions.append(await judged(client, pair))
            ranks.append(rank_of_session(sessions[-1].session_id))
        assert set(ranks) == {0, 1}
        for session in sessions[:2]:
            info = await client.veto_session(session.session_id, "by a test")
            assert (info.state, info.reason) == ("rejected", "vetoed: by a test")
        for session in sessions:
            info = await client.delete_session(session.session_id)
            assert (info.state, info.content) == ("rejected", "deleted")
            details = await client.session_details(session.session_id)
            assert [(r.name, r.value) for r in details.reward_history] == [("correct", 1)]
    for rank, proxy in pair.proxies.items():
        counts = proxy.service.sessions.counts
        assert counts.now["train", SessionState.REJECTED] == ranks.count(rank)
