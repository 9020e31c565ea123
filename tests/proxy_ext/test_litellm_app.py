from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette

from proxy_ext.litellm_app import LiteLLMApp
from tests.support.proxy import litellm_stand_in


async def test_litellm_is_loaded_once_at_the_first_request() -> None:
    loads, may_end = [], threading.Event()

    def load() -> Starlette:
        loads.append(threading.current_thread())
        assert may_end.wait(30)
        return litellm_stand_in()

    app = LiteLLMApp(load)
    async with app.lifespan():
        assert not loads
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rank") as http:
            first, *others = [asyncio.create_task(http.get("/health/liveliness")) for _ in range(4)]
            await asyncio.sleep(0.05)
            # The event loop runs meanwhile, and who asked first may leave.
            first.cancel()
            may_end.set()
            answers = await asyncio.gather(*others)
            answers.append(await http.get("/health/liveness"))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len(loads) == 1 and loads[0] is not threading.main_thread()


async def test_litellm_is_shut_down_at_the_end() -> None:
    said = []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        said.append("up")
        yield
        said.append("down")

    app = LiteLLMApp(lambda: Starlette(lifespan=lifespan))
    async with app.lifespan():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rank") as http:
            assert (await http.get("/health/liveness")).status_code == 404
        assert said == ["up"]
    assert said == ["up", "down"]


LIVENESS = """
import asyncio, sys, types
import httpx
import proxy_ext.__main__
from any_agent.config import Config
from proxy_ext.app import create_app

urls = {"engine_url": "http://127.0.0.1:1", "public_url": "http://127.0.0.1:2"}
app = create_app(Config(), None, rank=0, training=True, **urls)
access = types.SimpleNamespace(open_mode=False)
app.ours.app.state.service = types.SimpleNamespace(auth=types.SimpleNamespace(access=access))

async def ask():
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://rank") as http:
        for path in ("/health/liveness", "/health/liveliness"):
            headers = {"authorization": "Bearer sk-v1.0.key"}
            print((await http.get(path, headers=headers)).status_code, "litellm" in sys.modules)

asyncio.run(ask())
"""


@pytest.mark.service
def test_a_rank_answers_liveness_before_litellm_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIVENESS], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["200 False"] * 2, done.stderr


async def test_a_failed_load_of_litellm_is_tried_again() -> None:
    faults = [ImportError("not there")]

    def load() -> Starlette:
        if faults:
            raise faults.pop()
        return litellm_stand_in()

    app = LiteLLMApp(load)
    async with app.lifespan():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rank") as http:
            with pytest.raises(ImportError):
                await http.get("/health/liveness")
            assert (await http.get("/health/liveness")).status_code == 200
