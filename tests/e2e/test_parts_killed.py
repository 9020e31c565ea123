"""kill -9 of each part of a running service of two ranks: it is back, and sessions go on.

Real processes, and nothing of the service knows that it is a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import openai
import psutil
import pytest

from any_agent.auth.engine_key import key_of_engines
from any_agent.client.rl_client import RLClient
from any_agent.keys import rank_of_session
from any_agent.launcher import Node, NodeOptions
from any_agent.launcher.component import Component
from any_agent.protocol.rl import SessionStarted
from any_agent.rundir.registry import Registry, RegistryEntry, rank_name
from tests.support.e2e.live_run import live_config, looked_after

PARTS = ["engine-0", "rank-1", "router", "trainer"]


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def node(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: object, said: list[str]
) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("parts")
    config = live_config(
        folder,
        tiny_model_dir,  # type: ignore[arg-type]
        **{
            "server.admin_key": "the-operators-key",
            "rollout.batch_size": 4,
            "rollout.max_concurrent": 8,
            "sampling.max_new_tokens": 12,
            "train.steps": 1000,
        },
    )
    with Node(config, NodeOptions(say=said.append)) as node:
        yield node


@contextlib.asynccontextmanager
async def watched(node: Node) -> AsyncIterator[RLClient]:
    """The operator's client, while the node is looked after in this thread."""
    operator = RLClient(node.url, admin_key="the-operators-key", retry_for=120)
    async with operator as client, looked_after(node):
        yield client


def entry(node: Node, name: str) -> RegistryEntry:
    registry = Registry(node.dir.registry)
    registry.refresh()
    found = registry.get(name)
    assert found is not None
    return found


async def call(session: SessionStarted, text: str = "hello") -> str:
    """A model call of an agent that tries again, also where it is not told whether it was done."""
    async with openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=8, timeout=120
    ) as agent:
        for _ in range(3):
            with contextlib.suppress(openai.InternalServerError):
                done = await agent.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": text}]
                )
                return done.id
    raise AssertionError("three replies were lost")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def is_back(part: Component, restarts: int) -> bool:
    return part.restarts > restarts and part.state == "ready"


async def one_on_each_rank(client: RLClient) -> list[SessionStarted]:
    """Open eval sessions until there is one on each rank."""
    found: dict[int | None, SessionStarted] = {}
    for _ in range(40):
        session = await client.start_session(mode="eval")
        found.setdefault(rank_of_session(session.session_id), session)
    assert set(found) == {0, 1}, "opens are not spread over the ranks"
    return [found[0], found[1]]


def test_only_parts_that_compute_load_torch(node: Node) -> None:
    # Of the first seconds: a trainer loads it while the others serve.
    for name in ("engine-0", "engine-1", "rank-0", "rank-1", "router"):
        mapped = {file.path for file in psutil.Process(node.parts[name].pid).memory_maps()}
        assert any("libtorch" in path for path in mapped) == name.startswith("engine"), name


@pytest.mark.parametrize("name", PARTS)
def test_a_killed_part_is_back_and_sessions_go_on(node: Node, said: list[str], name: str) -> None:
    pids = {part.name: part.pid for part in node.parts.values()}
    urls = {rank: entry(node, rank).url for rank in ("rank-0", "rank-1", "router")}
    part = node.parts[name]
    restarts = part.restarts

    async def run() -> None:
        async with watched(node) as client:
            sessions = await one_on_each_rank(client)
            before = [await call(session) for session in sessions]
            os.kill(part.pid, signal.SIGKILL)
            # At once, while the part is away: whoever meets it waits, the others go on.
            after = await asyncio.gather(*(call(session, "again") for session in sessions))
            await until(lambda: is_back(part, restarts))
            for session, *completions in zip(sessions, before, after, strict=True):
                await client.set_reward(session.api_key, 1.0, completion_id=completions[0])
                info = await client.finalize(session.api_key)
                assert info.state == "evaluated"
                # A retried call may have been recorded twice, an acknowledged one is never lost.
                assert info.interactions >= 2
                assert info.rewards[completions[0]] == 1.0

    asyncio.run(run())
    changed = {other for other, pid in pids.items() if node.parts[other].pid != pid}
    assert changed == {name}
    assert {rank: entry(node, rank).url for rank in urls} == urls
    label = name.replace("-", " ")
    assert f"{label:<9} ended by SIGKILL; starting it again" in said


def test_sessions_go_on_when_the_engine_and_proxy_of_a_rank_are_killed_at_once(node: Node) -> None:
    """The proxy that comes back finds no engine yet."""

    async def run() -> None:
        async with watched(node) as client:
            sessions = await one_on_each_rank(client)
            parts = [node.parts[name] for name in ("engine-1", "rank-1")]
            restarts = [part.restarts for part in parts]
            for part in parts:
                os.kill(part.pid, signal.SIGKILL)
            assert await call(sessions[0])
            await until(lambda: all(map(is_back, parts, restarts)))
            assert await call(sessions[1])
            assert [part.restarts for part in parts] == [n + 1 for n in restarts]

    asyncio.run(run())


def test_a_killed_engine_serves_what_was_published_last(node: Node) -> None:
    async def run() -> None:
        async with watched(node) as client, httpx.AsyncClient(timeout=120) as http:
            opening = {"group_id": "g", "group_size": 4, "wait": 60.0}
            group = [await client.start_session(**opening) for _ in range(4)]  # type: ignore[arg-type]
            for session, reward in zip(group, (0.0, 1.0, 0.0, 1.0), strict=True):
                await call(session)
                await client.finalize(session.api_key, reward)
            ranks = [rank_name(0), rank_name(1)]
            await until(lambda: min(entry(node, rank).version for rank in ranks) >= 1)
            engine = node.parts["engine-0"]
            restarts = engine.restarts
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: is_back(engine, restarts))
            url = entry(node, "rank-0").engine_url
            key = {"Authorization": f"Bearer {key_of_engines(node.config)}"}
            told = (await http.get(f"{url}/model_info", headers=key)).json()
            version = entry(node, "rank-0").version
            assert told["weight_version"] == str(version)
            assert told["model_path"] == str(node.dir.weights / f"v{version:08d}")
            assert await call((await one_on_each_rank(client))[0])

    asyncio.run(run())
