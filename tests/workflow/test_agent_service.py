"""Agents in processes of their own: they may block, hang and crash."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from any_agent.errors import AgentFailed, ConfigError
from any_agent.runtime import worker_pool as workers
from any_agent.types import SessionState
from any_agent.workflow import AgentService, OpenAIProxyWorkflow, context
from any_agent.workflow.context import WorkflowContext
from tests.support.errors import fails_with
from tests.support.proxy import Proxy
from tests.support.workflow.agents import HELLO, Alarmed, MyAgent, MySyncAgent, Plain
from tests.workflow.conftest import ADMIN

pytestmark = pytest.mark.service


@pytest.fixture(scope="module", autouse=True)
def _processes() -> Iterator[None]:
    """Starting them takes seconds, so the tests share them."""
    yield
    workers.shared_pool("agents", 2).close()


async def episode(
    agent: Any, proxy: Proxy, limit: float = 60.0, mode: Any = "subproc", **data: Any
) -> dict[str, float | None]:
    """The rewards of its interactions."""
    service = AgentService(proxy.url, ADMIN, mode, max_workers=2, timeout=limit)
    with context.use(WorkflowContext(task_id="t")):
        workflow = OpenAIProxyWorkflow.of(agent, service)
        result = await workflow.arun_episode(None, {"messages": HELLO, **data})
    return {id: one.reward for id, one in (result or {}).items()}


async def test_agents_that_block_run_side_by_side_in_sessions_of_their_own(proxy: Proxy) -> None:
    before = dict(os.environ)
    results = await asyncio.gather(*(episode(MySyncAgent(), proxy) for _ in range(3)))
    assert [[*rewards.values()] for rewards in results] == [[0.5]] * 3
    assert len({id for rewards in results for id in rewards}) == 3, "each its own session"
    assert dict(os.environ) == before


async def test_an_agent_that_is_no_coroutine_runs_in_a_process_by_itself(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    assert [*(await episode(Plain(), proxy, mode="auto")).values()] == [1.0]
    assert "Plain.run is no coroutine function: it runs in processes from now on" in caplog.text


async def test_an_agent_that_needs_a_main_thread_runs_in_a_process(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    service = AgentService(proxy.url, ADMIN, max_workers=2)
    workflow = OpenAIProxyWorkflow.of(Alarmed(), service)
    items = [{"messages": HELLO} for _ in range(4)]

    async def rewards() -> list[float]:
        with context.use(WorkflowContext(task_id="t")):
            found = await asyncio.gather(*(workflow.arun_episode(None, item) for item in items[:2]))
            found += [await workflow.arun_episode(None, item) for item in items[2:]]
        await context.close_clients()
        return [one.reward for interactions in found for one in (interactions or {}).values()]

    with caplog.at_level(logging.WARNING):
        assert await asyncio.to_thread(asyncio.run, rewards()) == [0.25] * 4
    assert caplog.text.count("Alarmed.run needs a main thread: it runs in processes") == 1
    states = [line.state async for line in proxy.client.sessions()]
    assert states.count("trained") == 4, "what was tried in a thread is not trained on"
    assert 1 <= states.count("aborted") <= 2
    assert len(states) == states.count("trained") + states.count("aborted")
    assert all(item == {"messages": HELLO} for item in items[:2]), "it is run on what it was given"


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        ("raise", "agent_failed", "agents.py"),
        ("exit", "agent_failed", "SystemExit: 3"),
        ("crash", "agent_crashed", "process"),
        ("unpicklable", "agent_failed", "lambda"),
    ],
)
async def test_an_agent_that_fails_costs_its_own_episode_alone(
    proxy: Proxy, does: str, code: str, said: str
) -> None:
    bad, good = await asyncio.gather(
        episode(MySyncAgent(), proxy, does=does),
        episode(MySyncAgent(), proxy),
        return_exceptions=True,
    )
    assert isinstance(bad, AgentFailed) and isinstance(good, dict)
    assert bad.code == code and said in bad.message
    assert [*good.values()] == [0.5]
    states = [(await proxy.service.journal.session(f"t-0-{k}")) for k in range(2)]
    assert sorted(row.state for row in states if row) == ["aborted", "trained"]


async def test_an_agent_that_hangs_in_a_process_is_ended(proxy: Proxy) -> None:
    # Its time counts from when a worker has begun: importing the agent is part of it.
    await episode(MySyncAgent(), proxy)
    with fails_with(AgentFailed, "1 s", code="agent_timeout"):
        await episode(MySyncAgent(), proxy, limit=1.0, does="hang")
    row = await proxy.service.journal.session("t-0-1")
    assert row is not None
    assert row.state is SessionState.ABORTED


async def test_no_session_waits_for_a_worker(proxy: Proxy) -> None:
    """It would expire in a long queue, and hold a place."""
    service = AgentService(proxy.url, ADMIN, "subproc", max_workers=2)
    workflow = OpenAIProxyWorkflow.of(MySyncAgent(), service)
    most = 0
    running = asyncio.gather(*(workflow.arun_episode(None, {"messages": HELLO}) for _ in range(8)))
    while not running.done():
        most = max(most, sum(s.state == "open" for s in proxy.service.sessions.live.values()))
        await asyncio.sleep(0.01)
    assert 1 <= most <= 2
    assert all(await running)


class Locked(MyAgent):
    def __init__(self) -> None:
        self.settings = {"lock": threading.Lock()}


async def test_an_agent_or_an_item_that_cannot_be_sent_is_refused_at_once(proxy: Proxy) -> None:
    class Local(MyAgent):
        pass

    for agent, named in ((Locked(), "Locked.settings['lock']"), (Local(), "Local")):
        with fails_with(ConfigError, named):
            OpenAIProxyWorkflow(agent=agent, proxy_addr="http://x", mode="subproc")
    with fails_with(ConfigError, "['of']", "lock"):
        await episode(MySyncAgent(), proxy, of=threading.Lock())


async def test_an_agent_that_needs_a_process_and_cannot_be_sent_is_refused(proxy: Proxy) -> None:
    class Local(MyAgent):
        async def run(self, data: Any, **extra_kwargs: Any) -> float:
            try:
                raise ValueError("signal only works in main thread of the main interpreter")
            except ValueError:
                raise KeyError("an answer") from None

    with fails_with(ConfigError, "Local.run", "main thread"):
        await episode(Local(), proxy, mode="auto")
    with pytest.raises(KeyError):
        await episode(Local(), proxy, mode="inline")

    class Sync:
        def run(self, data: Any) -> float:
            return 1.0

    with fails_with(ConfigError, "Sync.run"):
        OpenAIProxyWorkflow(agent=Sync(), proxy_addr="http://x")
