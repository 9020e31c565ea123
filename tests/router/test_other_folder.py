"""A router on a machine that does not see the run's folder: it finds the ranks by Redis."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path

import pytest

from any_agent.chat import ChatFormat
from any_agent.client.rl_client import RLClient
from any_agent.keys import rank_of_session
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.registry import Heartbeat
from any_agent.rundir.store_beside import store_beside
from proxy_ext.server import entry_of
from tests.support.ports import own_port
from tests.support.proxy import LIMIT, config_for, running_proxy
from tests.support.redis_server import RedisServer
from tests.support.router import serving
from tests.support.scripted_engine import ScriptedEngine


@pytest.mark.service
async def test_an_agents_session_works_through_a_router_in_another_folder(
    tmp_path: Path, chat: ChatFormat
) -> None:
    engine, port = ScriptedEngine(decode=chat.decode), own_port()
    with RedisServer(tmp_path / "redis") as server:
        # An open with an Idempotency-Key waits for its home, which must be the rank that there is.
        settings = (f"server.journal={server.url}", "server.ranks=1")
        here, there = (config_for(tmp_path / name, *settings) for name in ("here", "there"))
        for config in (here, there):
            trial_dir(config).create()
        trial_dir(here).signing_secret()
        shutil.copy(trial_dir(here).secret, trial_dir(there).secret)
        async with engine.serve(), running_proxy(here, chat, engine_url=engine.url) as proxy:
            entry = partial(entry_of, proxy.service, url=proxy.url, boot_id="boot")
            heartbeat = Heartbeat(trial_dir(here).registry, entry, store_beside(here))
            await heartbeat.begin()
            async with (
                asyncio.timeout(LIMIT),
                serving(there, port),
                RLClient(f"http://127.0.0.1:{port}", timeout=LIMIT, trust_env=False) as client,
            ):
                started = await client.start_session(mode="eval", patience=LIMIT)
                assert rank_of_session(started.session_id) == 0
                await client.finalize(started.api_key)
            await heartbeat.end()
        names = [path.name for path in trial_dir(there).registry.iterdir()]
        assert names == ["router.json"], "no rank wrote there"
