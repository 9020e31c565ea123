"""The journal's disk fills up under agents: writes are refused with 507, reads go on, and when
there is space again so do the agents, without a restart and with all that was acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.config import Config
from any_agent.launcher.trial import trial_dir
from any_agent.types import TERMINAL_STATES, SessionState
from proxy_ext.journal import SQLiteJournal
from tests.chaos.conftest import Figure
from tests.support.proxy import Proxy, config_for, running_proxy
from tests.support.scripted_engine import ScriptedEngine
from tests.support.small_disk import Disk, small_disk

AGENTS = 8
DISK = 24 << 20
LOG = 6 << 20
"""The journal's log is copied into its file at 4 MB; a commit may take it beyond."""
LARGE = "All work and no play makes Jack a dull boy. " * 40


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_for(tmp_path, "sessions.group_size=1")


@pytest.fixture
def disk(config: Config) -> Iterator[Disk]:
    """The journal's folder is a tmpfs of its own."""
    with small_disk(trial_dir(config).journal(0).parent, DISK) as disk:
        yield disk


@dataclass
class Agent:
    """One session, and what it was told."""

    proxy: Proxy
    session_id: str
    key: str
    acknowledged: list[str] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)

    async def call(self, *, stream: bool) -> bool:
        """Whether it was acknowledged; if not, it was refused as it should be."""
        messages = [{"role": "user", "content": f"{len(self.acknowledged)} {LARGE}"}]
        if stream:
            events, _ = await self.proxy.stream(self.key, messages)
            if "error" in events[-1]:
                assert events[-1]["error"]["code"] == "store_full"
                return False
            self.acknowledged.append(events[-1]["id"])
            return True
        response = await self.proxy.call(self.key, messages)
        if not self.accepted(response):
            return False
        self.acknowledged.append(response.json()["id"])
        return True

    async def reward(self, value: float) -> bool:
        body = {"reward": value, "completion_id": self.acknowledged[0]}
        response = await self.proxy.post("/rl/v1/set_reward", body, self.key)
        if not self.accepted(response):
            return False
        self.rewards[self.acknowledged[0]] = value
        return True

    @staticmethod
    def accepted(response: httpx.Response) -> bool:
        if response.status_code == 200:
            return True
        assert response.status_code == 507, response.text
        assert response.json()["error"]["code"] == "store_full"
        assert int(response.headers["retry-after"]) >= 1
        assert "x-should-retry" not in response.headers
        return False


@asynccontextmanager
async def running(config: Config, chat: ChatFormat) -> AsyncIterator[Proxy]:
    engine = ScriptedEngine(decode=chat.decode)
    async with engine.serve(), running_proxy(config, chat, engine_url=engine.url) as proxy:
        await proxy.admit(1000)
        yield proxy


async def until_refused(agent: Agent, number: int) -> None:
    """Calls and rewards, until one of each was refused."""
    calls = rewards = True
    for turn in range(2000):
        if calls:
            calls = await agent.call(stream=(turn + number) % 2 == 1)
        elif rewards:
            # A small write may still fit where a large one did not.
            rewards = await agent.reward(float(turn))
        else:
            return
    raise AssertionError("the disk did not fill up")


async def check_reads(proxy: Proxy, agents: list[Agent]) -> None:
    for agent in agents:
        path = f"/rl/v1/sessions/{agent.session_id}"
        info = (await proxy.http.get(path)).raise_for_status().json()
        assert info["state"] == "open"
        assert info["interactions"] == len(agent.acknowledged)
        assert info["rewards"] == agent.rewards
    assert (await proxy.http.get("/healthz")).status_code == 200
    ready = await proxy.http.get("/readyz")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "store_full")
    assert "any_agent_journal_full 1" in (await proxy.http.get("/metrics")).text.replace(
        '{rank="0"}', ""
    )


@pytest.mark.gate
async def test_a_rank_keeps_what_it_acknowledged_when_its_disk_fills_up(
    config: Config, disk: Disk, tiny_model_dir: Path, long: bool, figure: Figure
) -> None:
    chat = load_chat_format(str(tiny_model_dir), enable_thinking=False)
    refused = log_size = 0
    agents: list[Agent] = []
    async with running(config, chat) as proxy:
        for _ in range(AGENTS):
            session = await proxy.open()
            agents.append(Agent(proxy, session["session_id"], session["api_key"]))
            assert await agents[-1].call(stream=False)
        for _ in range(10 if long else 2):
            disk.fill()
            await asyncio.gather(*(until_refused(a, k) for k, a in enumerate(agents)))
            refused += 2 * AGENTS
            log_size = max(log_size, disk.log_size)
            # Whatever is written is refused; whatever is read is there.
            opened = await proxy.http.post("/rl/v1/start_session", json={})
            finalized = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, agents[0].key)
            assert not Agent.accepted(opened)
            assert not Agent.accepted(finalized)
            await check_reads(proxy, agents)
            disk.make_room()
            for agent in agents:
                assert await agent.call(stream=False)
                assert await agent.call(stream=True)
                assert await agent.reward(0.5)
        for agent in agents[:2]:
            finalized = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, agent.key)
            assert Agent.accepted(finalized)
        disk.fill()
    disk.make_room()
    await check_stored(config, agents)
    assert log_size < LOG
    acknowledged = sum(len(a.acknowledged) for a in agents)
    figure(
        f"disk full under {AGENTS} agents: {refused} writes refused with 507, {acknowledged} calls "
        f"acknowledged, lost 0, the log at most {log_size / 2**20:.1f} MB"
    )


async def check_stored(config: Config, agents: list[Agent]) -> None:
    """Exactly what was acknowledged is in the file."""
    journal = SQLiteJournal(trial_dir(config).journal(0))
    open_states = [state for state in SessionState if state not in TERMINAL_STATES]
    rows = await journal.sessions(open_states)
    assert {row.id for row in rows} == {agent.session_id for agent in agents}
    for agent in agents:
        stored: list[Any] = await journal.interactions(agent.session_id)
        assert [one.interaction.id for one in stored] == agent.acknowledged
        rewards = {i.interaction.id: i.interaction.reward for i in stored}
        assert {id: r for id, r in rewards.items() if r is not None} == agent.rewards
    states = [row.state for row in rows]
    assert states.count(SessionState.FINALIZED) == 2
    await journal.close()
