"""Agents that know nothing of training, run as workflows over a real service."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
from openai import APIStatusError, AsyncOpenAI, AuthenticationError, BadRequestError

from any_agent.client.environment import PLACEHOLDER_KEY
from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.errors import AgentFailed, AnyAgentError, ConfigError
from any_agent.record import InteractionTree, InteractionWithTokenLogpReward
from any_agent.rollout.failure_budget import format_error
from any_agent.runtime import event_loop
from any_agent.sdk.find_service import find_service
from any_agent.types import SessionState
from any_agent.workflow import (
    AgentService,
    OpenAIProxyClient,
    OpenAIProxyWorkflow,
    context,
    openai_proxy,
    rows_of,
)
from any_agent.workflow.context import WorkflowContext
from any_agent.workflow.proxy_client import task_name
from tests.support.engine.embedded import fresh_logprobs
from tests.support.errors import fails_with
from tests.support.proxy import Proxy, until
from tests.support.scripted_engine import ScriptedEngine
from tests.support.workflow.agents import (
    HELLO,
    Elsewhere,
    Hangs,
    Keyless,
    MyAgent,
    RewardsItself,
    Skips,
    Stubborn,
)
from tests.workflow.conftest import ADMIN

ITEM = {"messages": HELLO}


def workflow_of(agent: Any, proxy: Proxy, **how: Any) -> OpenAIProxyWorkflow:
    return OpenAIProxyWorkflow.of(agent, AgentService(proxy.url, ADMIN, **how))


async def episode(
    agent: Any, proxy: Proxy, data: Any = ITEM, *, is_eval: bool = False, **how: Any
) -> dict[str, InteractionWithTokenLogpReward] | None:
    with context.use(WorkflowContext(task_id=7, is_eval=is_eval)):
        return await workflow_of(agent, proxy, **how).arun_episode(None, data)


async def rewards_of(agent: Any, proxy: Proxy, data: Any = ITEM, **how: Any) -> list[float | None]:
    """Those of an episode's interactions."""
    return [i.reward for i in (await episode(agent, proxy, data, **how) or {}).values()]


async def state_of(proxy: Proxy, session_id: str = "7-0-0") -> tuple[SessionState, str | None]:
    row = await proxy.service.journal.session(session_id)
    assert row is not None
    return row.state, row.reason


async def aborted(proxy: Proxy) -> bool:
    return (await state_of(proxy))[0] is SessionState.ABORTED


async def test_an_episode_is_what_the_engine_sampled(
    real_proxy: Proxy, embedded: EmbeddedEngine
) -> None:
    episode_ = await episode(MyAgent(turns=3), real_proxy, discount=0.5)
    assert episode_ is not None
    assert [i.reward for i in episode_.values()] == [0.25, 0.5, 1.0]
    recorded = await real_proxy.recorded("7-0-0")
    tree = InteractionTree.from_interactions(recorded)
    assert list(episode_) == [i.id for i in recorded]
    for (row, _), interaction in zip(rows_of(episode_), recorded, strict=True):
        prompt = tree.prompt_ids(interaction.id).tolist()
        ids = row["input_ids"].tolist()
        assert ids == prompt + interaction.output_ids.tolist()
        fresh = fresh_logprobs(embedded.loaded.model, prompt, ids[len(prompt) :])
        assert np.allclose(row["logprobs"][len(prompt) :], fresh, atol=1e-3)
    assert (await state_of(real_proxy, "7-0-0"))[0] is SessionState.TRAINED
    assert real_proxy.service.sessions.grants.left == 0
    assert await real_proxy.lease() == [], "no trainer's poll is handed it"


async def test_an_agent_can_reward_each_completion_by_its_id(proxy: Proxy) -> None:
    agent = MyAgent(turns=2, reward=lambda all: {all[0].id: 0.5, all[1].id: np.float32(1)})
    assert await rewards_of(agent, proxy, discount=0.9) == pytest.approx([0.5 + 0.9, 1.0])


async def test_rewards_that_the_agent_has_set_itself_are_kept(proxy: Proxy) -> None:
    assert await rewards_of(RewardsItself(), proxy) == [0.25]


@pytest.mark.parametrize("theirs", [None, "sk-of-another-provider"])
async def test_an_agent_needs_no_key(
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    theirs: str | None,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", theirs or "")
    agent = Keyless()
    with caplog.at_level(logging.DEBUG):
        assert await rewards_of(agent, proxy) == [1.0]
    assert os.environ["OPENAI_API_KEY"] == (theirs or PLACEHOLDER_KEY)
    key = agent.url.removesuffix("/v1").rpartition("/")[2]
    assert agent.url == f"{proxy.url}/{key}/v1"
    assert key.startswith("sk-v1.0.")
    assert "/v1/chat/completions" in caplog.text
    assert key not in caplog.text


async def test_the_url_says_whose_a_call_is_and_no_key_does(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a run sets it: an agent that is given no key needs one all the same.
    monkeypatch.setenv("OPENAI_API_KEY", PLACEHOLDER_KEY)
    http = await context.get_aiohttp_session()
    ours, other = (OpenAIProxyClient(http, proxy.url, f"t{k}", ADMIN) for k in range(2))
    for client in (ours, other):
        await client.grant_capacity()
    async with ours, other, httpx.AsyncClient() as own_client:
        patient = await context.get_httpx_client()
        await Keyless("DUMMY").run(ITEM, other.session_url, patient)
        # A client of its own leaves the key in the URL.
        await Keyless("DUMMY").run(ITEM, other.session_url, own_client)
        with fails_with(BadRequestError, "session_mismatch"):
            await Keyless(ours.session_api_key).run(ITEM, other.session_url, own_client)
        await Keyless(ours.session_api_key).run(ITEM, other.session_url, patient)
        assert [len(await proxy.recorded(f"t{k}-0-0")) for k in range(2)] == [0, 3]
        for http_client in (patient, own_client):
            body = {"model": "x", "messages": HELLO, "max_tokens": 4}
            for path, sent in (("v1/messages", body), ("rl/set_reward", {"reward": 0.5})):
                headers = {"x-api-key": "DUMMY"}
                url = f"{other.session_url}/{path}"
                answer = await http_client.post(url, json=sent, headers=headers)
                assert answer.status_code == 200, answer.text
        forged = other.session_url.replace("sk-v1.0.", "sk-v1.0.0")
        with pytest.raises(AuthenticationError):
            await Keyless(ours.session_api_key).run(ITEM, forged, patient)
        await other.set_last_reward(1.0)
    with fails_with(APIStatusError, "session"):
        await Keyless().run(ITEM, other.session_url, await context.get_httpx_client())
    assert [len(await proxy.recorded(f"t{k}-0-0")) for k in range(2)] == [0, 5]


class Shows:
    """Raises errors whose texts hold the URLs that it called."""

    def __init__(self, patient: bool) -> None:
        self.patient = patient
        self.url = ""

    async def run(self, data: Any, base_url: str, http_client: httpx.AsyncClient) -> None:
        self.url = base_url
        if self.patient:
            (await http_client.get(f"{base_url}/nothing")).raise_for_status()
        async with aiohttp.ClientSession() as http, http.get(f"{base_url}/nothing") as answer:
            answer.raise_for_status()


@pytest.mark.parametrize("patient", [True, False])
async def test_no_error_of_ours_shows_the_key(proxy: Proxy, patient: bool) -> None:
    agent = Shows(patient)
    with pytest.raises((httpx.HTTPStatusError, aiohttp.ClientResponseError)) as raised:
        await episode(agent, proxy)
    _, reason = await state_of(proxy)
    assert "404" in (reason or "")
    key = agent.url.removesuffix("/v1").rpartition("/")[2]
    shown = [reason or "", format_error(raised.value), *([str(raised.value)] if patient else [])]
    assert all(key not in text for text in shown)


async def test_a_conversation_exported_as_concat_is_one_row(proxy: Proxy) -> None:
    result = await episode(MyAgent(turns=3), proxy, export_style="concat")
    assert result is not None
    ((row, _),) = rows_of(result)
    recorded = await proxy.recorded("7-0-0")
    assert row["loss_mask"].sum() == sum(len(i.output_ids) for i in recorded)


async def test_the_items_own_task_id_names_its_sessions(proxy: Proxy) -> None:
    await episode(MyAgent(), proxy, {**ITEM, "task_id": "sum-12"})
    # What cannot be part of an id stands for itself all the same, at each run.
    for _ in range(2):
        await episode(MyAgent(), proxy, {**ITEM, "task_id": "12 + 15?"})
    odd = task_name("12 + 15?")
    assert odd != task_name("12 + 16?")
    ids = {line.session_id async for line in proxy.client.sessions()}
    assert ids == {"sum-12-0-0", f"{odd}-0-0", f"{odd}-0-1"}


async def test_an_evaluation_needs_no_grant_and_is_sampled_as_it_asks(
    proxy: Proxy, scripted: ScriptedEngine
) -> None:
    agent = MyAgent(temperature=0.25, reward=0.75)
    assert await rewards_of(agent, proxy, is_eval=True) == [0.75]
    assert scripted.requests[-1]["sampling_params"]["temperature"] == 0.25
    (session,) = [line async for line in proxy.client.sessions()]
    assert (session.mode, session.state) == ("eval", "evaluated")
    assert await rewards_of(agent, proxy)
    assert scripted.requests[-1]["sampling_params"]["temperature"] == 1.0


async def test_a_run_that_skips_its_item_is_rejected(proxy: Proxy) -> None:
    assert await episode(Skips(), proxy) is None
    assert await aborted(proxy)


@pytest.mark.parametrize(
    ("agent", "code"),
    [
        (MyAgent(reward=math.nan), "invalid_reward"),
        (MyAgent(reward=2e6), "invalid_reward"),
        (MyAgent(reward="good"), "invalid_reward"),
        (MyAgent(reward=[1.0]), "invalid_reward"),
        (MyAgent(reward=lambda _: {"chatcmpl-x": 1.0}), "invalid_reward"),
        (MyAgent(reward=lambda _: {1: 1.0}), "invalid_reward"),
        (MyAgent(reward=lambda all: {all[0].id: math.inf}), "invalid_reward"),
        (Elsewhere(), "no_model_call"),
        (MyAgent(reward=None), "no_reward"),
        (MyAgent(reward=lambda _: {}), "no_reward"),
    ],
)
async def test_what_is_no_reward_is_named(proxy: Proxy, agent: Any, code: str) -> None:
    with fails_with(AgentFailed, f"{type(agent).__name__}", code=code):
        await episode(agent, proxy)
    assert await aborted(proxy)


class ReadsEnvironment:
    """Makes its client of what the environment says, as an agent of the mode subproc does."""

    async def run(self, data: Any, **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="DUMMY")
        await client.chat.completions.create(model="x", messages=data["messages"])
        return 1.0


@pytest.mark.parametrize("setting", ["", "http://127.0.0.1:9/sk-v1.placeholder/v1"])
async def test_a_call_to_the_url_of_the_environment_is_refused_at_once(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "")
    monkeypatch.setenv("OPENAI_BASE_URL", setting)
    with fails_with(AuthenticationError, "base_url", "mode=subproc") as raised:
        await episode(ReadsEnvironment(), proxy)
    note = format_error(raised.value)
    assert "rollout.agent.mode=subproc" in note and "OPENAI_BASE_URL" in note
    assert await aborted(proxy)
    # It is no service of anybody's.
    with pytest.raises(ConfigError):
        find_service(environ={"OPENAI_BASE_URL": os.environ["OPENAI_BASE_URL"]})


async def test_a_url_or_a_key_of_the_environment_stays(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url, key in (("http://127.0.0.1:9/v1", ""), ("", "sk-of-another-provider")):
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        monkeypatch.setenv("OPENAI_API_KEY", key)
        await episode(MyAgent(), proxy)
        assert os.environ["OPENAI_BASE_URL"] == url


async def test_an_agent_that_holds_the_loop_is_named_once(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workflow = workflow_of(MyAgent(turns=2), proxy)
    with context.use(WorkflowContext(task_id=7)):
        await workflow.arun_episode(None, ITEM)
        assert "blocked the event loop" not in caplog.text
        monkeypatch.setattr(openai_proxy, "MAX_BLOCKED", 0.0)
        await workflow.arun_episode(None, ITEM)
    (told,) = [one for one in caplog.messages if "blocked the event loop" in one]
    assert "agents.MyAgent.run" in told and "rollout.agent.mode=subproc" in told


async def test_a_hanging_agent_is_cancelled_and_its_session_aborted(proxy: Proxy) -> None:
    agent = Hangs()
    with fails_with(AgentFailed, "0.05 s", "rollout.agent.timeout", code="agent_timeout"):
        await episode(agent, proxy, timeout=0.05)
    assert agent.cancelled == 1
    assert await aborted(proxy)


async def test_an_agent_that_will_not_end_holds_up_nobody(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loop, "CANCEL_TIMEOUT", 0.05)
    agent = Stubborn()
    with fails_with(AgentFailed, code="agent_timeout"):
        await episode(agent, proxy, timeout=0.05)
    assert "Stubborn did not end after it was cancelled" in caplog.text
    assert await aborted(proxy)
    agent.free.set()


async def test_cancelling_an_episode_ends_its_session_and_its_call(
    proxy: Proxy, scripted: ScriptedEngine
) -> None:
    scripted.hold(2)
    task = asyncio.create_task(episode(MyAgent(), proxy))
    await until(lambda: scripted.running)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()

    await until(lambda: aborted(proxy))
    await until(lambda: not scripted.running)


async def test_a_service_that_is_not_there_is_an_error_of_unavailability() -> None:
    service = AgentService("http://127.0.0.1:9", patience=0.2)
    with fails_with(AnyAgentError, code="service_unavailable"):
        await OpenAIProxyWorkflow.of(MyAgent(), service).arun_episode(None, ITEM)
    await context.close_clients()


async def breaks(data: Any, base_url: str = "") -> float:
    return 1 / 0


async def deaf(data: Any) -> float:
    return 1.0


async def test_what_is_raised_before_any_call_has_no_note_about_calls(proxy: Proxy) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        await episode(SimpleNamespace(run=breaks), proxy)
    assert format_error(raised.value) == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("agent", "mode", "said"),
    [
        (object(), "inline", "run"),
        (MyAgent, "inline", "instance"),
        (SimpleNamespace(run=lambda data, **extra_kwargs: 1.0), "inline", "async def run"),
        (SimpleNamespace(run=deaf), "inline", "base_url"),
        (MyAgent(), "online", "auto, inline or subproc"),
    ],
)
def test_agents_and_modes_that_cannot_be_run_are_refused(agent: Any, mode: Any, said: str) -> None:
    with fails_with(ConfigError, said):
        OpenAIProxyWorkflow(agent=agent, proxy_addr="http://127.0.0.1:1", mode=mode)
