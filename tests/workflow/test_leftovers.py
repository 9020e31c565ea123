"""What a training script that was killed had begun at the ranks is gone with its next start."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.auth.access import run_dir_of, signer_of
from any_agent.client.rl_client import RLClient
from any_agent.config import Config
from any_agent.errors import AnyAgentError
from any_agent.types import SessionState
from any_agent.workflow import AgentService, OpenAIProxyClient, OpenAIProxyWorkflow, context
from any_agent.workflow.context import WorkflowContext
from tests.support.errors import fails_with
from tests.support.proxy import Proxy
from tests.support.workflow.agents import HELLO, MyAgent
from tests.workflow.conftest import ADMIN


def run_key_of(config: Config) -> str:
    return signer_of(run_dir_of(config)).run_key


async def opened(proxy: Proxy, key: str, task: str, *, ended: bool) -> str:
    """A session of an agent whose script does nothing more with it."""
    http = await context.get_aiohttp_session()
    client = OpenAIProxyClient(http, proxy.url, task, key)
    await client.grant_capacity()
    await client.__aenter__()
    await proxy.complete(client.session_api_key)
    if ended:
        await client.set_last_reward(1.0)
        await client.__aexit__(None, None, None)
    assert client.session_id is not None
    return client.session_id


async def begun(proxy: Proxy, key: str) -> int:
    """The status of an opening that takes a grant."""
    asked = {"task_id": "outside", "rewards": "agent"}
    return (await proxy.post("/rl/start_session", asked, key)).status_code


async def state_of(proxy: Proxy, session_id: str) -> SessionState:
    row = await proxy.service.journal.session(session_id)
    assert row is not None
    return row.state


async def test_the_next_start_ends_what_the_last_one_left(proxy: Proxy) -> None:
    key = run_key_of(proxy.service.config)
    http = await context.get_aiohttp_session()
    runs = await opened(proxy, key, "runs", ended=False)
    over = await opened(proxy, key, "over", ended=True)
    persons = await opened(proxy, ADMIN, "persons", ended=True)
    for _ in range(3):
        await OpenAIProxyClient(http, proxy.url, "unused", key).grant_capacity()
    await OpenAIProxyClient(http, proxy.url, "unused", ADMIN).grant_capacity()

    # Agents outside get no grant of the trainer's: nobody would train on what they do on it.
    assert await begun(proxy, ADMIN) == 200
    assert await begun(proxy, ADMIN) == 429

    for epoch in (1, 2, 2):
        async with RLClient(proxy.url, admin_key=key, epoch=epoch) as trainer:
            await trainer.set_capacity(limit=0, ttl=60, owner="new", held=[])
        if epoch == 1:
            assert await state_of(proxy, runs) is SessionState.ABORTED
            assert await state_of(proxy, over) is SessionState.REJECTED
            assert await state_of(proxy, persons) is SessionState.FINALIZED, "it is exported later"
            assert proxy.service.sessions.run_grants.left == 0
            assert await begun(proxy, key) == 429
            later = await opened(proxy, key, "later", ended=True)
        if epoch == 2:
            assert await state_of(proxy, later) is SessionState.REJECTED
    assert (await proxy.capacity())["reserved"] == 0


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Raises:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await MyAgent().run(data, **extra_kwargs)
        raise self.error


@pytest.mark.parametrize("error", [ValueError("\ud800 half a character\0"), Odd()])
async def test_whatever_an_agent_raises_its_session_is_aborted(
    proxy: Proxy, error: Exception
) -> None:
    workflow = OpenAIProxyWorkflow.of(Raises(error), AgentService(proxy.url, ADMIN))
    with context.use(WorkflowContext(task_id=7)), pytest.raises(type(error)):
        await workflow.arun_episode(None, {"messages": HELLO})
    assert await state_of(proxy, "7-0-0") is SessionState.ABORTED


async def test_what_cannot_be_exported_is_not_kept(proxy: Proxy) -> None:
    service = AgentService(proxy.url, lambda: ADMIN, export_style="none such")  # type: ignore[arg-type]
    assert ADMIN not in repr(AgentService(proxy.url, ADMIN))
    workflow = OpenAIProxyWorkflow.of(MyAgent(), service)
    with context.use(WorkflowContext(task_id=7)), fails_with(AnyAgentError, param="style"):
        await workflow.arun_episode(None, {"messages": HELLO})
    assert await state_of(proxy, "7-0-0") is SessionState.REJECTED
