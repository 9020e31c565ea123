"""Agents that open no sessions: each conversation becomes one, which the grader rewards."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
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
    over,
    says,
    session,
    settings,
    will_say,
)
from tests.support.messages import agent_of, said_back
from tests.support.proxy import Proxy, turned_away, until
from tests.support.proxy_fixtures import Start
from tests.support.retries import Agent, text_of
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture
async def proxy(start: Start) -> Proxy:
    """One that needs no key, with room for many sessions."""
    return await start(*settings(), admit=100)


async def test_a_conversation_without_a_session_opens_one_and_stays_in_it(proxy: Proxy) -> None:
    async with client(proxy) as agent:
        messages: list[Any] = list(ONE)
        for _ in range(3):
            done = await agent.chat.completions.create(
                model="gpt-4o", messages=messages, max_tokens=8, metadata={"plus": "2"}
            )
            messages += [done.choices[0].message.to_dict(), MORE]
    (id,) = proxy.service.sessions.live
    tree = session(proxy, id).tree
    assert [str(i.continuation) for i in tree] == ["root", "exact", "exact"]
    assert session(proxy, id).row.metadata == {"plus": "2"}
    assert session(proxy, id).row.opened_by == "implicit: anyone"
    ended = await idle(proxy, id)
    assert (ended["state"], ended["final_reward"]) == ("finalized", 8.0)
    (trajectory,) = await proxy.lease()
    assert trajectory.final_reward == 8
    assert proxy.service.implicit.calls == {"opened": 1, "continued": 2}


async def test_two_agents_at_once_have_a_session_each(proxy: Proxy, engine: ScriptedEngine) -> None:
    """Two that begin alike are two attempts; each goes on with the answer that it got."""
    will_say(engine, proxy, "one", "two")
    (first, a), (second, b) = await asyncio.gather(says(proxy, ONE), says(proxy, ONE))
    assert a != b and {first["content"], second["content"]} == {"one", "two"}
    talks = {a: [*ONE, first, MORE], b: [*ONE, second, MORE]}
    for _ in range(2):
        for id in (b, a):
            answer, got = await says(proxy, talks[id])
            assert got == id
            talks[id] += [answer, MORE]
    assert proxy.service.implicit.calls == {"opened": 2, "continued": 4}
    rows = [session(proxy, id).row for id in (a, b)]
    assert rows[0].task_id == rows[1].task_id and str(rows[0].task_id).startswith("auto-")


async def test_sessions_that_said_the_same_are_continued_in_turn(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    will_say(engine, proxy, *["same"] * 3)
    ids = [(await says(proxy, ONE))[1] for _ in range(3)]
    assert len(set(ids)) == 3
    said = {"role": "assistant", "content": "same"}
    went = [(await says(proxy, [*ONE, said, MORE]))[1] for _ in range(3)]
    assert went == ids
    assert proxy.service.implicit.calls == {"opened": 3, "ambiguous": 2, "continued": 1}
    # What several think is known by what they thought, or else by nothing: as a fork of the oldest.
    assert (await says(proxy, [*ONE, said, MORE]))[1] == ids[0]


async def test_a_fork_stays_in_its_session_and_another_question_has_one_of_its_own(
    proxy: Proxy,
) -> None:
    answer, id = await says(proxy, ONE)
    other = {"role": "user", "content": "A different one."}
    for messages in ([*ONE, answer, MORE], [*ONE, answer, other], [*ONE, answer, MORE]):
        assert (await says(proxy, messages))[1] == id
    root, *forks = session(proxy, id).tree
    assert [fork.parent_id for fork in forks] == [root.id] * 3
    others = [[SYSTEM, other], [{"role": "system", "content": "You are long."}, *ONE[1:]], ONE[1:]]
    assert len({id, *[(await says(proxy, messages))[1] for messages in others]}) == 4


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_conversation_that_ended_is_not_continued_in_another_session(
    start: Start, proxy: Proxy, engine: ScriptedEngine, restarted: bool
) -> None:
    """Nor in one that has said the beginning of it."""
    will_say(engine, proxy, "same", "same", "more")
    (answer, a), (_, b) = [await says(proxy, ONE) for _ in range(2)]
    further, got = await says(proxy, [*ONE, answer, MORE])
    assert got == a
    if restarted:
        proxy = await start(*settings(), admit=10)
    await proxy.http.post(f"/rl/v1/sessions/{a}/abort", json={})
    _, c = await says(proxy, [*ONE, answer, MORE, further, MORE])
    assert c not in (a, b)
    assert [str(i.continuation) for i in session(proxy, c).tree] == ["root"]


async def test_a_call_renews_the_idle_time(proxy: Proxy) -> None:
    answer, id = await says(proxy, ONE)
    session(proxy, id).active -= 200
    await says(proxy, [*ONE, answer, MORE])
    assert session(proxy, id).idle_timeout == 300
    assert session(proxy, id).idle_expires - asyncio.get_running_loop().time() > 250


async def test_an_implicit_session_goes_to_the_grader_at_its_ttl(proxy: Proxy) -> None:
    """Nobody else could end it."""
    _, id = await says(proxy, ONE)
    proxy.end_ttl({"session_id": id})
    ended = await over(proxy, id)
    assert (ended["state"], ended["final_reward"]) == ("finalized", 2)
    assert proxy.service.expiry.outcomes == {"graded": 1}


async def test_an_implicit_session_without_an_answer_expires(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    for end in ("idle", "ttl"):
        engine.fail("status", status=400)
        assert (await proxy.call(KEY, ONE)).status_code >= 400
        (id,) = proxy.service.sessions.live
        if end == "ttl":
            proxy.end_ttl({"session_id": id})
        ended = await over(proxy, id) if end == "ttl" else await idle(proxy, id)
        assert (ended["state"], ended["interactions"]) == ("expired", 0)
        assert "no call was answered" in ended["reason"]


async def test_a_failed_first_call_that_comes_again_reuses_its_session(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    engine.fail("status", status=400)
    assert (await proxy.call(KEY, ONE)).status_code >= 400
    (id,) = proxy.service.sessions.live
    assert (await says(proxy, ONE))[1] == id
    # It has an answer now: the next attempt is one of its own.
    assert (await says(proxy, ONE))[1] != id
    assert proxy.service.implicit.calls == {"opened": 2, "reused": 1}


async def test_a_marked_retry_finds_its_call(proxy: Proxy, engine: ScriptedEngine) -> None:
    agent = Agent(proxy, engine, {"api_key": KEY, "session_id": ""}, messages=ONE)
    go_on = engine.hold(2)
    await agent.leave(0)
    (id,) = (agent.id,) = proxy.service.sessions.live
    await agent.vacant()
    again = agent.begin(1)
    go_on.set()
    answer = await again
    assert (answer.status_code, answer.headers["x-any-agent-session"]) == (200, id)
    assert len(engine.requests) == 1
    assert proxy.service.implicit.calls == {"opened": 1, "retried": 1}


INSTRUCTIONS, ASKED = ONE[0]["content"], ONE[1]["content"]


def turns(proxy: Proxy) -> list[str]:
    """How each call of the only session came about."""
    (id,) = proxy.service.sessions.live
    return [str(i.continuation) for i in session(proxy, id).tree]


async def go_on(agent: openai.AsyncOpenAI, first: Any, named: bool, **asked: Any) -> Any:
    """Go on from a response by its id, or by the whole conversation."""
    if named:
        return await agent.responses.create(
            input="Another one.", previous_response_id=first.id, **asked
        )
    said = [item.to_dict(mode="json") for item in first.output]
    whole: Any = [{"role": "user", "content": ASKED}, *said, MORE]
    return await agent.responses.create(input=whole, **asked)


@pytest.mark.parametrize("named", [False, True])
async def test_responses_go_on_by_the_whole_conversation_or_the_earlier_answers_id(
    proxy: Proxy, named: bool
) -> None:
    asked: dict[str, Any] = {"model": "m", "instructions": INSTRUCTIONS, "max_output_tokens": 16}
    async with client(proxy) as agent:
        first = await agent.responses.create(input=ASKED, **asked)
        again = await go_on(agent, first, named, **asked)
        assert turns(proxy) == ["root", "exact"]
        assert (await agent.responses.retrieve(again.id)).output_text == again.output_text
        items = await agent.responses.input_items.list(first.id)
        assert len(items.data) == 1


async def test_a_request_without_a_conversation_opens_no_session(proxy: Proxy) -> None:
    body = {"model": "m", "input": "hi", "previous_response_id": "resp_0000" + "0" * 28}
    response = await proxy.post("/v1/responses", body, KEY)
    refusal(response, 404, "previous_response_not_found", "")
    response = await proxy.http.get("/v1/responses/resp_0000abc")
    refusal(response, 404, "response_not_found", "")
    response = await proxy.post("/v1/completions", {"model": "m", "prompt": "a"}, KEY)
    refusal(response, 400, "no_conversation", "")
    assert not proxy.service.sessions.live


async def test_one_conversation_over_all_apis_stays_one_session(proxy: Proxy) -> None:
    events, _ = await proxy.stream(KEY, ONE)
    messages: list[Any] = [*ONE, {"role": "assistant", "content": text_of(events)}, MORE]
    asked: dict[str, Any] = {"model": "claude", "max_tokens": 8, "system": INSTRUCTIONS}
    async with agent_of(proxy, KEY) as agent:
        for stream in (False, True):
            if stream:
                async with agent.messages.stream(messages=messages[1:], **asked) as parts:
                    answer = await parts.get_final_message()
            else:
                answer = await agent.messages.create(messages=messages[1:], **asked)
            messages += [said_back(answer), MORE]
    async with client(proxy) as other:
        plain: Any = [
            {
                **m,
                "content": m["content"]
                if isinstance(m["content"], str)
                else m["content"][0]["text"],
            }
            for m in messages[1:]
        ]
        await other.responses.create(
            model="m", instructions=INSTRUCTIONS, input=plain, max_output_tokens=16
        )
    assert turns(proxy) == ["root", "exact", "exact", "exact"]


OTHER = [SYSTEM, {"role": "user", "content": "Say a word."}]


async def test_tenants_never_share_a_session(start: Start) -> None:
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
    headers = {"authorization": f"Bearer {bob}"}
    response = await proxy.http.get(f"/v1/responses/{given.id}", headers=headers)
    refusal(response, 404, "response_not_found", "")


async def test_only_known_keys_open_implicit_sessions_and_within_their_quota(start: Start) -> None:
    refusal(await (await start()).call(KEY, ONE), 401, "no_session", "")  # it is opt-in
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


async def test_a_first_call_without_a_slot_waits_and_holds_no_place(start: Start) -> None:
    proxy = await start(*settings("sessions.implicit_wait=0.01"))
    turned_away(await proxy.call(KEY, ONE), 429, "no_capacity")
    assert not proxy.service.sessions.live and proxy.service.calls.concurrency.in_use == 0
    await proxy.admit(1)
    await says(proxy, ONE)
    # One that leaves while it waits opens nothing; as training ends one gets an eval session.
    proxy = await start(*settings())
    waiting = proxy.service.sessions.admission
    asked = [asyncio.create_task(says(proxy, talk)) for talk in (OTHER, [MORE])]
    await until(lambda: waiting.waiting == 2)
    assert proxy.service.calls.concurrency.in_use == 0
    asked[0].cancel()
    await until(lambda: waiting.waiting == 1)
    await proxy.client.set_run("finished", step=1, checkpoint=None)
    _, id = await asked[1]
    assert session(proxy, id).row.mode == "eval"
    assert len(proxy.service.sessions.live) == 2, "it, and the one of the process before"


async def test_a_call_that_cannot_be_sampled_opens_no_session(start: Start) -> None:
    proxy = await start(*settings(), admit=5)
    for messages, fields, code in (
        ([{"role": "user", "content": "word " * 5000}], {}, "context_length_exceeded"),
        ([{"role": "user", "content": ""}] * 5000, {}, "context_length_exceeded"),
        (ONE, {"metadata": {"a": "x" * 100_000}}, "invalid_request"),
        (ONE, {"suffix": "x"}, "unsupported_parameter"),
    ):
        refusal(await proxy.call(KEY, messages, **fields), 400, code, "")
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


async def test_without_training_implicit_sessions_are_graded_as_eval_sessions(
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


@pytest.mark.parametrize("named", [False, True])
async def test_an_implicit_session_open_as_training_ends_stays_a_train_session(
    start: Start, engine: ScriptedEngine, named: bool
) -> None:
    """Its further calls are sampled as its first ones were, however they are found."""
    proxy = await start(*settings("sampling.temperature=0.7"), admit=5)
    async with client(proxy) as agent:
        asked: Any = {"model": "m", "max_output_tokens": 16, "temperature": 0.5}
        first = await agent.responses.create(input=ASKED, **asked)
        await proxy.client.set_run("finished", step=1, checkpoint=None)
        await go_on(agent, first, named, **asked)
    (id,) = proxy.service.sessions.live
    assert len(session(proxy, id).tree) == 2 and session(proxy, id).row.mode == "train"
    assert [r["sampling_params"]["temperature"] for r in engine.requests] == [0.7, 0.7]


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


async def test_an_implicit_session_goes_on_after_a_restart(start: Start) -> None:
    proxy = await start(*settings(), admit=10)
    answer, id = await says(proxy, ONE)
    _, other = await says(proxy, OTHER)
    asked: dict[str, Any] = {"model": "m", "max_output_tokens": 16}
    async with client(proxy) as agent:
        given = await agent.responses.create(input=ASKED, **asked)
    again = await start(*settings(), admit=10)
    assert (await says(again, [*ONE, answer, MORE]))[1] == id
    assert [str(i.continuation) for i in session(again, id).tree] == ["root", "exact"]
    async with client(again) as agent:
        assert (await agent.responses.retrieve(given.id)).output_text == given.output_text
        await go_on(agent, given, True, **asked)
    assert len(again.service.sessions.live) == 3
    assert session(again, other).idle_timeout == 300
    assert (await idle(again, id))["final_reward"] == 4
