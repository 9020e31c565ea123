"""A trainer that pauses for hours, and clocks that are set, by a clock that the test turns on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from any_agent.auth.key_store import create_key
from any_agent.chat import load_chat_format
from any_agent.errors import Conflict
from any_agent.launcher.trial import trial_dir
from tests.chaos.conftest import Figure
from tests.support.proxy import Proxy, config_for, running_proxy
from tests.support.scripted_engine import ScriptedEngine

MINUTE, HOUR = 60.0, 3600.0


class Clocks:
    """This process's clocks, which can be turned on, and the wall clock, which can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed = self.wrong = 0.0
        monotonic, boot, wall = time.monotonic, time.clock_gettime, time.time
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + self.passed)
        monkeypatch.setattr(time, "clock_gettime", lambda clock: boot(clock) + self.passed)
        monkeypatch.setattr(time, "time", lambda: wall() + self.passed + self.wrong)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


@asynccontextmanager
async def running(root: Path, model: Path, *settings: str) -> AsyncIterator[Proxy]:
    chat = load_chat_format(str(model), enable_thinking=False)
    engine = ScriptedEngine(decode=chat.decode)
    config = config_for(root, "sessions.group_size=1", *settings)
    async with engine.serve(), running_proxy(config, chat, engine_url=engine.url) as proxy:
        yield proxy


async def state_of(proxy: Proxy, session: dict[str, Any]) -> tuple[str, str]:
    info = (await proxy.http.get(f"/rl/v1/sessions/{session['session_id']}")).json()
    return info["state"], info["reason"] or ""


async def test_nothing_is_lost_or_trained_twice_when_a_trainer_pauses_for_hours(
    tmp_path: Path, tiny_model_dir: Path, clocks: Clocks, long: bool, figure: Figure
) -> None:
    """Nothing that agents did meanwhile is lost or trained twice, and nobody waits for ever."""
    hours = 72 if long else 6
    patient = ("sessions.ttl=1e6", "sessions.group_timeout=1e6")
    async with running(tmp_path, tiny_model_dir, *patient) as proxy:
        await proxy.admit(100)
        leased = await proxy.finished_session(reward=1.0)
        assert [t.session_id for t in await proxy.lease()] == [leased["session_id"]]
        waiting = await proxy.finished_session(reward=2.0)
        silent, alive, brief = [await proxy.open(ttl=ttl) for ttl in (1e6, 1e6, HOUR)]
        await proxy.complete(alive["api_key"])
        beat = f"/rl/v1/sessions/{alive['session_id']}/heartbeat"
        refused = 0
        for _ in range(3 * hours):
            clocks.passed += 20 * MINUTE
            await proxy.service.expiry.sweep()
            await proxy.service.leases.expire()
            beaten = await proxy.post(beat, {}, alive["api_key"])
            assert beaten.status_code == 200, beaten.text
            # The trainer's limit ran out with it: agents are told so at once.
            answer = await proxy.http.post("/rl/v1/start_session", json={"wait": 0})
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            refused += 1
        assert await state_of(proxy, leased) == ("finalized", "")
        assert await state_of(proxy, waiting) == ("finalized", "")
        assert (await state_of(proxy, alive))[0] == "open"
        assert (await state_of(proxy, silent))[1].startswith("idle for 1800 s")
        assert (await state_of(proxy, brief))[0] == "expired"
        # The trainer goes on where it was, and acknowledges what it no longer has.
        with pytest.raises(Conflict):
            await proxy.client.ack(owner="trainer", trained=[leased["session_id"]], rejected=[])
        await proxy.admit(100, number=1)
        await proxy.complete(alive["api_key"])
        await proxy.post("/rl/v1/finalize", {"final_reward": 3}, alive["api_key"])
        got: dict[str, float | None] = {}
        while batch := await proxy.lease():
            assert not got.keys() & {t.session_id for t in batch}
            got |= {t.session_id: t.final_reward for t in batch}
        ids = [session["session_id"] for session in (leased, waiting, alive)]
        assert got == dict(zip(ids, (1.0, 2.0, 3.0), strict=True))
        for _ in range(2):
            await proxy.client.ack(owner="trainer", trained=ids, rejected=[])
        assert {await state_of(proxy, s) for s in (leased, waiting, alive)} == {("trained", "")}
        assert (await proxy.open())["session_id"]
    figure(f"a trainer paused for {hours} h: {refused} opens refused at once, 3 of 3 trained once")


@pytest.mark.parametrize("wrong", [-48 * HOUR, -2 * HOUR, 2 * HOUR, 48 * HOUR])
async def test_a_wall_clock_that_is_set_ends_no_key_and_no_session(
    tmp_path: Path, tiny_model_dir: Path, clocks: Clocks, wrong: float
) -> None:
    keys = trial_dir(config_for(tmp_path)).keys
    keys.parent.mkdir(parents=True)
    create_key(keys, "admin")
    brief, _ = create_key(keys, "tenant", tenant="brief", expires_in=HOUR)
    lasting, _ = create_key(keys, "tenant", tenant="lasting", expires_in=3 * HOUR)
    async with running(tmp_path, tiny_model_dir) as proxy:

        async def opens(key: str) -> int:
            body = {"mode": "eval", "ttl": 2 * HOUR}
            return (await proxy.post("/rl/v1/start_session", body, key)).status_code

        assert [await opens(key) for key in (brief, lasting)] == [200, 200]
        clocks.wrong = wrong
        assert [await opens(key) for key in (brief, lasting)] == [200, 200]
        clocks.passed = 1.5 * HOUR
        # Its time is over, whatever the clock on the wall says, and stays over.
        assert [await opens(key) for key in (brief, lasting)] == [401, 200]
        clocks.wrong = -wrong
        assert [await opens(key) for key in (brief, lasting)] == [401, 200]
        clocks.passed = 3.5 * HOUR
        assert [await opens(key) for key in (brief, lasting)] == [401, 401]
