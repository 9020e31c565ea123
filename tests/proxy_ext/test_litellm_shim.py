from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from starlette.applications import Starlette

from proxy_ext.litellm_shim import LiteLLMApp
from tests.proxy_ext.proxy_lab import litellm_stand_in

_SOURCE = """
import asyncio, logging
from any_agent.logs import set_up_logging
from proxy_ext import litellm_shim

set_up_logging("debug", "json", part="rank-0", secrets=["the-admin-key"])
app = litellm_shim.load_app()

async def main():
    async with litellm_shim.lifespan(app):
        for name in ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router"):
            logging.getLogger(name).error("got sk-12345678 and the-admin-key")

asyncio.run(main())
"""


def test_what_it_logs_goes_through_our_form_without_keys() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SOURCE],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    said = [line["logger"] for line in lines if line["message"] == "got sk-*** and ***"]
    assert said == ["LiteLLM", "LiteLLM Proxy", "LiteLLM Router"]


async def test_it_is_loaded_once_when_it_is_asked_first() -> None:
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


async def test_it_is_shut_down_at_the_end() -> None:
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


def test_a_proxy_that_serves_has_not_imported_it() -> None:
    source = "import sys, proxy_ext.__main__, proxy_ext.app; print('litellm' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "False", done.stderr
