"""Agents that open no sessions: whose, how many, what is refused, graders and restarts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from proxy_ext.sessions.conversation_index import ImplicitTask
from tests.proxy_ext.api.test_refusals import refusal
from tests.proxy_ext.test_metrics import scrape
from tests.proxy_ext.test_tenants import ADMIN, Tenants
from tests.support.implicit import (
    KEY,
    MORE,
    ONE,
    SYSTEM,
    client,
    idle,
    says,
    session,
    settings,
    will_say,
)
from tests.support.proxy import Proxy, turned_away, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine

OTHER = [SYSTEM, {"role": "user", "content": "Say a word."}]


async def test_tenants_never_share_a_session(start: Start, engine: ScriptedEngine) -> None:
    proxy = await start(*settings(ADMIN), admit=100)
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice"), tenants.key("bob")
    answer, hers = await says(proxy, ONE, alice)
    talk = [*ONE, answer, MORE]
    _, his = await says(proxy, talk, bob)
    assert his != hers
    assert (await says(proxy, talk, alice))[1] == hers
    rows = [session(proxy, id).row for id in (hers, his)]
    assert [row.tenant for row in rows] == ["alice", "bob"]
    assert rows[0].opened_by is not None and rows[0].opened_by.startswith("implicit: tenant alice")
    async with client(proxy, alice) as agent:
        given = await agent.responses.create(model="m", input="hi", max_output_tokens=16)
    body = {"model": "m", "input": "hi", "previous_response_id": given.id}
    refusal(await proxy.post("/v1/responses", body, bob), 404, "previous_response_not_found", "")
    response = await proxy.http.get(
        f"/v1/responses/{given.id}", headers={"authorization": f"Bearer {bob}"}
    )
    refusal(response, 404, "response_not_found", "")


async def test_who_may_open_how_many(start: Start, proxy: Proxy) -> None:
    refusal(await proxy.call(KEY, ONE), 401, "no_session", "")  # it is opt-in
    proxy = await start(*settings(ADMIN), admit=100)
    refusal(await proxy.call(None, ONE), 401, "no_session", "")
    response = await proxy.http.post("/v1/chat/completions", json={"messages": ONE})
    refusal(response, 401, "no_session", "")
    refusal(await proxy.call("sk-nobodys", ONE), 401, "invalid_api_key", "")
    assert not proxy.service.sessions.live
    key = Tenants(proxy).key("alice", open_sessions=1)
    answer, id = await says(proxy, ONE, key)
    turned_away(await proxy.call(key, OTHER), 429, "quota_exceeded")
    # What goes on opens none.
    assert (await says(proxy, [*ONE, answer, MORE], key))[1] == id
    proxy = await start(*settings("sessions.max_open=1"), admit=100)
    turned_away(await proxy.call(KEY, OTHER), 429, "too_many_sessions")


async def test_without_a_slot_it_waits_and_holds_no_place(start: Start) -> None:
    proxy = await start(*settings("sessions.implicit_wait=0.01"))
    turned_away(await proxy.call(KEY, ONE), 429, "no_capacity")
    assert not proxy.service.sessions.live and proxy.service.calls.concurrency.in_use == 0
    await proxy.admit(1)
    await says(proxy, ONE)


async def test_one_that_leaves_while_it_waits_opens_nothing(start: Start) -> None:
    proxy = await start(*settings())
    asked = asyncio.create_task(proxy.call(KEY, ONE))
    waiting = proxy.service.sessions.admission
    await until(lambda: waiting.waiting)
    assert proxy.service.calls.concurrency.in_use == 0
    asked.cancel()
    await until(lambda: not waiting.waiting)
    await proxy.admit(5)
    assert not proxy.service.sessions.live


async def test_what_cannot_be_sampled_opens_nothing(start: Start) -> None:
    proxy = await start(*settings(), admit=5)
    long = [{"role": "user", "content": "word " * 5000}]
    refusal(await proxy.call(KEY, long), 400, "context_length_exceeded", "")
    many = [{"role": "user", "content": ""}] * 5000
    refusal(await proxy.call(KEY, many), 400, "context_length_exceeded", "")
    refusal(await proxy.call(KEY, ONE, metadata={"a": "x" * 100_000}), 400, "invalid_request", "")
    refusal(await proxy.call(KEY, ONE, suffix="x"), 400, "unsupported_parameter", "")
    assert not proxy.service.sessions.live


async def test_long_text_of_a_short_body_is_hashed_off_the_loop(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    hash_messages = ImplicitTask.hash_messages

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return hash_messages(*args)

    monkeypatch.setattr(ImplicitTask, "hash_messages", noted)
    proxy = await start(*settings(), admit=5)
    search: dict[str, Any] = {"name": "search", "input_schema": {"type": "object"}}
    later = {**search, "name": "later", "description": "x" * 30_000, "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "later"}
    found = {"type": "tool_result", "tool_use_id": "x", "content": [reference] * 5}
    hello = {"role": "user", "content": "hi"}
    body = {"model": "m", "max_tokens": 8, "tools": [search, later], "messages": [hello]}
    for _ in range(2):
        assert (await proxy.post("/v1/messages", body, KEY)).status_code == 200
    body["messages"] = [hello, {"role": "user", "content": [found]}]
    response = await proxy.post("/v1/messages", body, KEY)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_without_training_they_are_recorded_and_graded_as_eval_sessions(
    start: Start, engine: ScriptedEngine
) -> None:
    """Sampling is as the agent asks: none of a run's is forced on it."""
    proxy = await start(*settings(), training=False)
    response = await proxy.post("/v1/completions", {"model": "m", "prompt": "a"}, KEY)
    assert response.status_code == 200 and not proxy.service.sessions.live
    answer, id = await says(proxy, ONE, temperature=0.5)
    assert (await says(proxy, [*ONE, answer, MORE]))[1] == id
    assert [r["sampling_params"]["temperature"] for r in engine.requests[1:]] == [0.5, 1.0]
    assert [str(i.continuation) for i in session(proxy, id).tree] == ["root", "exact"]
    ended = await idle(proxy, id)
    assert (ended["mode"], ended["state"], ended["final_reward"]) == ("eval", "evaluated", 4)
    assert not await proxy.lease()


async def test_one_that_waits_for_a_session_as_training_ends_gets_an_eval_session(
    start: Start,
) -> None:
    proxy = await start(*settings())
    asked = asyncio.create_task(says(proxy, ONE))
    await until(lambda: proxy.service.sessions.admission.waiting)
    await proxy.http.put("/rl/v1/run", json={"state": "finished", "step": 1})
    _, id = await asked
    assert session(proxy, id).row.mode == "eval"


@pytest.mark.parametrize("named", [False, True])
async def test_one_that_is_open_as_training_ends_stays_a_train_session(
    start: Start, engine: ScriptedEngine, named: bool
) -> None:
    """Its further calls are sampled as its first ones were, however they are found."""
    proxy = await start(*settings(), admit=5)
    async with client(proxy) as agent:
        asked: Any = {"model": "m", "max_output_tokens": 16, "temperature": 0.5}
        first = await agent.responses.create(input="hi", **asked)
        run = {"state": "finished", "step": 1}
        assert (await proxy.http.put("/rl/v1/run", json=run)).status_code == 200
        if named:
            await agent.responses.create(input="more", previous_response_id=first.id, **asked)
        else:
            said = [item.to_dict(mode="json") for item in first.output]
            whole: Any = [{"role": "user", "content": "hi"}, *said, MORE]
            await agent.responses.create(input=whole, **asked)
    (id,) = proxy.service.sessions.live
    assert len(session(proxy, id).tree) == 2 and session(proxy, id).row.mode == "train"
    assert [r["sampling_params"]["temperature"] for r in engine.requests] == [1.0, 1.0]


@pytest.mark.parametrize("rewards", ["null", "agent"])
async def test_a_reward_that_its_tenant_gives_counts_if_it_may(start: Start, rewards: str) -> None:
    """The agent has its tenant's key, too."""
    proxy = await start(*settings(f"sessions.rewards={rewards}"), admit=5)
    _, id = await says(proxy, ONE)
    response = await proxy.post("/rl/v1/set_reward", {"final_reward": 9, "session_id": id}, KEY)
    if rewards == "null":
        refusal(response, 403, "judge_only", "")
        assert (await idle(proxy, id))["final_reward"] != 9
        return
    assert response.status_code == 200, response.text
    ended = await idle(proxy, id)
    assert (ended["state"], ended["final_reward"]) == ("finalized", 9)
    assert proxy.service.expiry.outcomes == {"rewarded": 1}
    now = await scrape(proxy)
    assert now("any_agent_implicit_calls_total", how="opened") == 1
    assert now("any_agent_implicit_sessions_ended_total") == 1
    assert now("any_agent_implicit_sessions_open") == 0


async def test_it_goes_on_after_a_restart(start: Start) -> None:
    proxy = await start(*settings(), admit=10)
    answer, id = await says(proxy, ONE)
    _, other = await says(proxy, OTHER)
    async with client(proxy) as agent:
        given = await agent.responses.create(model="m", input="hi", max_output_tokens=16)
    again = await start(*settings(), admit=10)
    _, got = await says(again, [*ONE, answer, MORE])
    assert got == id
    tree = session(again, id).tree
    assert [str(i.continuation) for i in tree] == ["root", "exact"]
    async with client(again) as agent:
        assert (await agent.responses.retrieve(given.id)).output_text == given.output_text
        await agent.responses.create(
            model="m", input="more", max_output_tokens=16, previous_response_id=given.id
        )
    assert len(again.service.sessions.live) == 3
    assert session(again, other).idle_timeout == 300
    assert (await idle(again, id))["final_reward"] == 4


async def test_what_ends_unread_after_a_restart_is_not_gone_on_with_in_another(
    start: Start, engine: ScriptedEngine
) -> None:
    proxy = await start(*settings(), admit=10)
    will_say(engine, proxy, "same", "same", "more")
    (answer, a), (_, b) = [await says(proxy, ONE) for _ in range(2)]
    further, got = await says(proxy, [*ONE, answer, MORE])
    assert got == a
    again = await start(*settings(), admit=10)
    await again.http.post(f"/rl/v1/sessions/{a}/abort", json={})
    _, c = await says(again, [*ONE, answer, MORE, further, MORE])
    assert c not in (a, b)
