"""Engines, ranks and routers that are stopped under a real service, which notices it by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from any_agent.launcher import Node, NodeOptions
from tests.support.e2e.killing import stopped
from tests.support.e2e.live_run import live_config, looked_after
from tests.support.ports import own_port
from tests.support.real_parts import embedded_engine

START = "/rl/v1/start_session"
NOTICED = 5.0
"""Seconds within which the truth is told; the rest is for a busy machine."""
BUSY = 10.0
HUNG_AFTER = 8.0


class Lab:
    """A client of a service, and what it asks."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def ready(self) -> list[int]:
        response = await self.http.get("/readyz")
        return response.json()["ranks"] if response.status_code == 200 else []

    async def engine_up(self, rank: int) -> float:
        text = (await self.http.get("/metrics")).text
        (line,) = [
            line
            for line in text.splitlines()
            if line.startswith("any_agent_engine_up{") and f'rank="{rank}"' in line
        ]
        return float(line.rpartition(" ")[2])

    async def open_eval(self) -> dict[str, Any]:
        response = await self.http.post(START, json={"mode": "eval"})
        response.raise_for_status()
        return response.json()

    async def open_once(self, key: str) -> httpx.Response:
        body = {"mode": "eval"}
        return await self.http.post(START, json=body, headers={"Idempotency-Key": key})

    async def open_sessions(self) -> set[str]:
        listed = (await self.http.get("/rl/v1/sessions", params={"state": "open"})).json()
        return {session["session_id"] for session in listed}

    async def becomes(self, condition: Callable[[], Awaitable[bool]], within: float) -> float:
        """The seconds until it is so."""
        began = time.monotonic()
        while not await condition():
            assert time.monotonic() - began < within, "it did not happen"
            await asyncio.sleep(0.1)
        return time.monotonic() - began


async def use(node: Node, work: Callable[[Lab], Awaitable[None]]) -> None:
    """Do the work, while parts that die are started again in this thread."""
    async with looked_after(node), httpx.AsyncClient(base_url=node.url, timeout=60) as http:
        await work(Lab(http))


def rank_of(session: dict[str, Any]) -> int:
    return int(session["api_key"].split(".")[1])


async def count(session: dict[str, Any], tokens: int) -> int:
    """One call; its tokens."""
    async with openai.AsyncOpenAI(
        base_url=session["base_url"], api_key=session["api_key"], max_retries=0, timeout=300
    ) as client:
        done = await client.chat.completions.create(
            model="x",
            messages=[{"role": "user", "content": "count"}],
            max_tokens=tokens,
        )
    assert done.usage is not None
    return done.usage.completion_tokens


def serving(tmp_path: Path, model: Path, **more: object) -> tuple[Node, list[str]]:
    said: list[str] = []
    settings = {"engine.hung_after": HUNG_AFTER, "engine.update_wait": 120, "server.ranks": 2}
    config = live_config(tmp_path, model, **settings, **more)
    return Node(config, NodeOptions(train=False, say=said.append)), said


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> Iterator[tuple[Node, list[str]]]:
    """A service with engines of its own, and what it says."""
    starting, said = serving(tmp_path_factory.mktemp("hung"), tiny_model_dir)
    with starting as node:
        yield node, said


def test_an_engine_of_the_service_that_hangs_is_restarted_and_its_call_goes_on(
    served: tuple[Node, list[str]],
) -> None:
    node, said = served

    async def work(lab: Lab) -> None:
        session = await lab.open_eval()
        rank = rank_of(session)
        assert await lab.ready() == [0, 1]
        engine = node.parts[f"engine-{rank}"]
        first = engine.pid
        with stopped(first):
            # The engine takes the call: nothing tells yet that it hangs.
            call = asyncio.create_task(count(session, 16))
            took = await lab.becomes(lambda: _is(lab.ready, [1 - rank]), NOTICED + BUSY)
            print(f"noticed after {took:.1f} s")
            assert await lab.engine_up(rank) == 0
            for _ in range(4):
                assert rank_of(await lab.open_eval()) == 1 - rank
            assert not call.done()
            await lab.becomes(lambda: _is(lab.ready, [0, 1]), 120)
        assert engine.pid != first
        assert await asyncio.wait_for(call, 120) > 0
        assert await lab.engine_up(rank) == 1

    asyncio.run(use(node, work))
    label = [line for line in said if "has not answered for 8 s; killing it" in line]
    assert len(label) == 1


def test_opens_avoid_a_stopped_rank(served: tuple[Node, list[str]]) -> None:
    node, _ = served

    async def work(lab: Lab) -> None:
        await lab.becomes(lambda: _is(lab.ready, [0, 1]), 60)
        known = await lab.open_sessions()
        with stopped(node.parts["rank-0"].pid):
            # At once, when nothing tells yet that the rank is stopped.
            began = time.monotonic()
            opened = await asyncio.gather(*(lab.open_eval() for _ in range(6)))
            took = time.monotonic() - began
            print(f"opened elsewhere after {took:.1f} s")
            assert {rank_of(session) for session in opened} == {1}
            assert took < NOTICED + BUSY
            # Those that are bound to a rank are refused, or opened where they must be.
            answers = await asyncio.gather(*(lab.open_once(f"k{k}") for k in range(6)))
            assert {answer.status_code for answer in answers} == {200, 503}
            for answer in answers:
                if answer.status_code == 503:
                    assert answer.headers["retry-after"]
        await lab.becomes(lambda: _is(lab.ready, [0, 1]), 60)
        # A retry under its key gets one session, and what the rank opened for clients that
        # went elsewhere is aborted.
        again = await asyncio.gather(*(lab.open_once(f"k{k}") for k in range(6)))
        assert {answer.status_code for answer in again} == {200}
        known |= {session["session_id"] for session in opened}
        known |= {answer.json()["session_id"] for answer in again}
        await lab.becomes(lambda: _is(lab.open_sessions, known), 30)

    asyncio.run(use(node, work))


def test_a_stopped_router_is_replaced(served: tuple[Node, list[str]]) -> None:
    node, _ = served

    async def work(lab: Lab) -> None:
        await lab.becomes(lambda: _is(lab.ready, [0, 1]), 60)
        router = node.parts["router"]
        first, restarts = router.pid, router.restarts
        with stopped(first):
            answer = asyncio.create_task(_answered(node.url))

            async def replaced() -> bool:
                return router.restarts > restarts

            noticed = await lab.becomes(replaced, NOTICED + BUSY)
            took = await asyncio.wait_for(answer, 120)
        print(f"noticed after {noticed:.1f} s, the first 200 after {took:.1f} s")
        assert router.pid != first
        await lab.becomes(lambda: _is(lab.ready, [0, 1]), 60)

    asyncio.run(use(node, work))


async def _answered(url: str) -> float:
    """Return the seconds until a client that asks again and again is answered."""
    began = time.monotonic()
    while True:
        async with httpx.AsyncClient(base_url=url, timeout=1) as http:
            with suppress(httpx.HTTPError):
                if (await http.get("/healthz")).status_code == 200:
                    return time.monotonic() - began
        await asyncio.sleep(0.1)


def test_the_service_goes_on_past_a_dead_and_a_stopped_engine_of_engine_urls(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    ports = [own_port() for _ in range(2)]
    folders = [tmp_path / f"engine-{k}" for k in range(2)]
    for folder in folders:
        folder.mkdir()
    with (
        embedded_engine(tiny_model_dir, ports[0], folders[0]) as first,
        embedded_engine(tiny_model_dir, ports[1], folders[1]) as second,
    ):
        starting, _ = serving(tmp_path, tiny_model_dir, **{"engine.urls": f"{first},{second}"})
        with starting as node:

            async def work(lab: Lab) -> None:
                assert await lab.ready() == [0, 1]
                with stopped(_listener(ports[1])):
                    await lab.becomes(lambda: _is(lab.ready, [0]), NOTICED + BUSY)
                    assert await lab.engine_up(1) == 0
                    assert {rank_of(await lab.open_eval()) for _ in range(6)} == {0}
                # It comes back by itself.
                await lab.becomes(lambda: _is(lab.ready, [0, 1]), 60)
                assert {rank_of(await lab.open_eval()) for _ in range(6)} == {0, 1}
                os.kill(_listener(ports[0]), signal.SIGKILL)
                await lab.becomes(lambda: _is(lab.ready, [1]), NOTICED + BUSY)
                assert await lab.engine_up(0) == 0
                assert {rank_of(await lab.open_eval()) for _ in range(6)} == {1}

            asyncio.run(use(node, work))


async def _is(read: Callable[[], Awaitable[Any]], value: Any) -> bool:
    return bool(await read() == value)


def _listener(port: int) -> int:
    """The id of the process that listens at a port."""
    import psutil

    (found,) = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid
    }
    return int(found)
