"""The table of states: whole, in agreement with the scopes, and held to by every route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any, TypeAlias

import httpx
import pytest

from any_agent.auth.access import Scope
from any_agent.types import TERMINAL_STATES, SessionMode, SessionState
from proxy_ext.sessions.state_machine import (
    EVENTS,
    STATES,
    TRANSITIONS,
    Event,
    refused_with,
    transitions,
)
from proxy_ext.web.permissions import AGENTS, JUDGES, RULES, STARTERS, TRAINERS
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start
from tests.support.sessions import abort, awaiting, info, over, played

Ask: TypeAlias = Callable[[Proxy, dict[str, Any]], Awaitable[httpx.Response]]
OWNER = "trainer"


def test_the_table_is_whole_and_leads_to_one_state_at_a_time() -> None:
    assert set(STATES) == set(SessionState)
    assert set(EVENTS) == set(Event)
    assert len(set(TRANSITIONS)) == len(TRANSITIONS)
    reached = {SessionState.OPEN}
    while more := {t.after for t in TRANSITIONS if t.before in reached} - reached:
        reached |= more
    assert reached == set(SessionState)
    # Only a resume leads out of a terminal state, and only out of those that a step made.
    for t in TRANSITIONS:
        if t.before in TERMINAL_STATES and t.after is not t.before:
            assert t.event is Event.REPLAY
            assert t.before in (SessionState.TRAINED, SessionState.REJECTED)
    # The end depends on the rewards too, and on guardrails.
    events = set(Event) - {Event.FINALIZE, Event.DEADLINE}
    for state, event, mode in product(SessionState, events, SessionMode):
        lines = [t for t in transitions(state, event) if t.mode in (None, mode)]
        assert len({t.after for t in lines}) <= 1


def test_each_event_is_allowed_to_the_scopes_of_the_table() -> None:
    scopes = {
        "the session's key, its tenant, an admin": AGENTS,
        "the session's key, its judge, its tenant, an admin": JUDGES,
        "a tenant, the trainer, an admin": STARTERS,
        "the trainer, an admin": TRAINERS,
        "the trainer": frozenset({Scope.ADMIN, Scope.TRAINER}),
        "its lease's owner": TRAINERS,
    }
    for rule in EVENTS.values():
        if rule.request:
            method, path = rule.request.partition(" {")[0].split()
            route = method, path.replace("{id}", "{session_id}")
            assert RULES[route].scopes == scopes[rule.by], rule


async def make_leased(proxy: Proxy) -> dict[str, Any]:
    session = await proxy.finished_session()
    await ok(lease(proxy, session))
    return session


async def make_trained(proxy: Proxy) -> dict[str, Any]:
    session = await make_leased(proxy)
    # Of a step that every kept checkpoint has behind it.
    await proxy.client.set_run("training", step=5, checkpoint=None, oldest_step=5)
    await ok(ack(proxy, session, "trained", step=1))
    return session


async def make_rejected(proxy: Proxy) -> dict[str, Any]:
    session = await make_leased(proxy)
    await ok(ack(proxy, session, "rejected"))
    return session


async def make_expired(proxy: Proxy) -> dict[str, Any]:
    session = await played(proxy)
    proxy.end_ttl(session)
    await over(proxy, session)
    return session


async def make_aborted(proxy: Proxy) -> dict[str, Any]:
    session = await played(proxy)
    await abort(proxy, session)
    return session


MAKE: dict[SessionState, Callable[[Proxy], Awaitable[dict[str, Any]]]] = {
    SessionState.OPEN: played,
    SessionState.AWAITING_REWARD: awaiting,
    SessionState.FINALIZED: lambda proxy: proxy.finished_session(),
    SessionState.LEASED: make_leased,
    SessionState.TRAINED: make_trained,
    SessionState.REJECTED: make_rejected,
    SessionState.EVALUATED: lambda proxy: proxy.finished_session(mode="eval"),
    SessionState.EXPIRED: make_expired,
    SessionState.ABORTED: make_aborted,
}


async def ok(request: Awaitable[httpx.Response]) -> None:
    response = await request
    assert response.status_code == 200, response.text


def post(path: str, body: Any = None) -> Ask:
    """With the session's key."""

    async def ask(proxy: Proxy, session: dict[str, Any]) -> httpx.Response:
        where = path.replace("{id}", session["session_id"])
        return await proxy.post(where, body or {}, session["api_key"])

    return ask


async def delete(proxy: Proxy, session: dict[str, Any]) -> httpx.Response:
    key = {"authorization": f"Bearer {session['api_key']}"}
    return await proxy.http.delete(f"/rl/v1/sessions/{session['session_id']}", headers=key)


async def lease(proxy: Proxy, session: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"owner": OWNER, "session_ids": [session["session_id"]], **fields}
    return await proxy.http.post("/rl/v1/lease", json=body)


async def ack(proxy: Proxy, session: dict[str, Any], how: str, **fields: Any) -> httpx.Response:
    id = session["session_id"]
    named: Any = [id] if how == "trained" else [{"session_id": id, "reason": "stale"}]
    return await proxy.http.post("/rl/v1/ack", json={"owner": OWNER, how: named, **fields})


ASK: dict[Event, Ask] = {
    Event.CALL: post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4}),
    Event.REWARD: post("/rl/v1/set_reward", {"reward": 0.5}),
    Event.HEARTBEAT: post("/rl/v1/sessions/{id}/heartbeat"),
    Event.AWAIT: post("/rl/v1/finalize", {"await_reward": True}),
    Event.FINALIZE: post("/rl/v1/finalize", {"final_reward": 1}),
    Event.ABORT: post("/rl/v1/sessions/{id}/abort"),
    Event.VETO: post("/rl/v1/sessions/{id}/veto"),
    Event.DELETE: delete,
    Event.LEASE: lease,
    Event.TRAIN: lambda proxy, session: ack(proxy, session, "trained", step=1),
    Event.REJECT: lambda proxy, session: ack(proxy, session, "rejected"),
    Event.REPLAY: lambda proxy, session: lease(proxy, session, replay=True),
}


@pytest.mark.parametrize("state", SessionState)
async def test_every_event_is_answered_as_the_table_says(state: SessionState, start: Start) -> None:
    """What is recorded is in the journal alone, and read when it is needed."""
    proxy = await start("sessions.hot_bytes=0", admit=100)
    mode = SessionMode.EVAL if state is SessionState.EVALUATED else SessionMode.TRAIN
    assert set(ASK) == {e for e, rule in EVENTS.items() if rule.request} - {Event.OPEN}
    for event, ask in ASK.items():
        session = await MAKE[state](proxy)
        assert (await info(proxy, session))["state"] == state
        response = await ask(proxy, session)
        after = (await info(proxy, session))["state"]
        allowed = [t.after for t in transitions(state, event) if t.mode in (None, mode)]
        if allowed:
            assert response.status_code == 200, (state, event, response.text)
            assert after in allowed, (state, event)
            continue
        code, _ = refused_with(state, event)
        status = 410 if code == "session_closed" else 409
        error = refusal(response, status, code)
        # A replay may name many: its message says which are wrong, and how they are.
        assert (
            f"is {state}" in error["message"] if event is Event.REPLAY else error["state"] == state
        )
        assert after == state, (state, event)


async def test_awaiting_a_reward_again_moves_no_deadline(proxy: Proxy) -> None:
    session = await played(proxy)
    key, wait = session["api_key"], {"await_reward": True}
    await ok(proxy.post("/rl/v1/finalize", {**wait, "deadline": 50, "final_reward": 2}, key))
    again = await proxy.post("/rl/v1/finalize", {**wait, "deadline": 3000, "final_reward": 2}, key)
    assert again.json()["awaits_in"] <= 50
    other = await proxy.post("/rl/v1/finalize", {**wait, "final_reward": 3}, key)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "already_finalized")
    await ok(proxy.post("/rl/v1/finalize", {"final_reward": 3}, key))
    assert (await info(proxy, session))["final_reward"] == 3


async def test_session_info_shows_state_times_and_rewards(proxy: Proxy) -> None:
    session = await proxy.open(task_id="t", group_size=1, ttl=100)
    key, id = session["api_key"], session["session_id"]
    completion = (await proxy.complete(key))["id"]
    await ok(proxy.post("/rl/v1/set_reward", {"reward": 2}, key))
    shown = await info(proxy, session)
    times = {name: shown.pop(name) for name in ("created_at", "expires_in", "idle_in")}
    (entry,) = shown.pop("reward_history")
    assert {name: value for name, value in shown.items() if value is not None} == {
        "session_id": id,
        "state": "open",
        "mode": "train",
        "task_id": "t",
        "group_id": session["group_id"],
        "opened_by": "anyone",
        "rewarded_by": "agent",
        "content": "stored",
        "interactions": 1,
        "rewards": {completion: 2.0},
        "rewarded": True,
        "first_version": 0,
        "last_version": 0,
        "output_tokens": 8,
        "trainable_calls": 1,
        "untrainable_calls": {},
        "roots": 1,
        "root_reasons": {},
        "roles": {},
        "rewards_given": 1,
    }
    assert 90 < times["expires_in"] <= 100
    assert 1700 < times["idle_in"] <= 1800
    assert entry.pop("at") == pytest.approx(times["created_at"], abs=60)
    given = {"interaction_id": completion, "name": None, "value": 2.0, "by": "session"}
    assert entry == {**given, "text": None}
    # And all of it once more from the journal.
    await ok(proxy.post("/rl/v1/finalize", {"await_reward": True, "deadline": 50}, key))
    shown = await info(proxy, session)
    assert 40 < shown["awaits_in"] <= 50
    assert (shown["expires_in"], shown["idle_in"]) == (None, None)
    await abort(proxy, session, reason="the tool was down")
    shown = await info(proxy, session)
    assert (shown["state"], shown["awaits_in"]) == ("aborted", None)
    error = (await proxy.call(key)).json()["error"]
    assert (error["state"], error["reason"]) == ("aborted", "the tool was down")
    assert shown["ended_at"] >= shown["created_at"]
    assert shown["rewards"] == {completion: 2.0}
