"""The agents of one session, named by a header: recorded, shown, leased and exported."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.completions.parsed_request import ROLE_HEADER
from any_agent.types import Interaction
from any_agent.workflow.proxy_client import exported_interactions
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start
from tests.support.retries import Agent, left
from tests.support.scripted_engine import ScriptedEngine

BODY = {"model": "m", "messages": HELLO, "max_tokens": 8}


async def talk(proxy: Proxy) -> dict[str, Any]:
    """A planner's call, two of a coder at other APIs, and one without a name."""
    session = await proxy.open(group_size=1)
    key = session["api_key"]
    for path, role, body in (
        ("chat/completions", "planner", {**BODY, "stream": True}),
        ("messages", "coder.v2", BODY),
        ("responses", "coder.v2", {"model": "m", "input": "Hello"}),
        ("chat/completions", "", BODY),
    ):
        named = {ROLE_HEADER: role} if role else {}
        response = await proxy.post(f"/v1/{path}", body, key, **named)
        assert response.status_code == 200, response.text
    return session


ROLES = ["planner", "coder.v2", "coder.v2", ""]


def roles_of(interactions: list[Interaction]) -> list[str]:
    return [one.role for one in interactions]


@pytest.mark.parametrize("kept", [True, False], ids=["texts", "no texts"])
async def test_the_role_of_a_call_is_recorded_shown_and_leased(start: Start, kept: bool) -> None:
    proxy = await start(f"sessions.store_content={str(kept).lower()}", admit=10)
    session = await talk(proxy)
    id = session["session_id"]
    assert roles_of(await proxy.recorded(id)) == ROLES
    page = (await proxy.http.get(f"/rl/v1/sessions/{id}/interactions")).json()
    assert [call["role"] for call in page["interactions"]] == ROLES
    ended = await proxy.post("/rl/v1/finalize", {"final_reward": 1.0}, session["api_key"])
    assert ended.json()["roles"] == {"planner": 1, "coder.v2": 2, "": 1}
    (trajectory,) = await proxy.lease(wait=60)
    assert roles_of(trajectory.interactions) == ROLES


async def test_exported_calls_have_their_roles(proxy: Proxy) -> None:
    session = await talk(proxy)
    await proxy.post("/rl/v1/finalize", {"final_reward": 1.0}, session["api_key"])
    asked = {"session_id": session["session_id"]}
    answer = (await proxy.post("/export_trajectories", asked)).json()
    assert [one["role"] for one in answer["interactions"].values()] == ROLES
    assert [one.role for one in exported_interactions(answer).values()] == ROLES


async def test_a_malformed_role_is_refused_and_nothing_is_recorded(proxy: Proxy) -> None:
    session = await proxy.open()
    key = session["api_key"]
    for name in ("-x", "a b", "a" * 65, "r\u00f4le", "a,b"):
        sent = {"authorization": f"Bearer {key}", ROLE_HEADER: name.encode()}
        odd = await proxy.http.post("/v1/chat/completions", json=BODY, headers=[*sent.items()])
        refusal(odd, 400, "invalid_request", "a role is")
    two = [("authorization", f"Bearer {key}"), (ROLE_HEADER, "a"), (ROLE_HEADER, "b")]
    both = await proxy.http.post("/v1/chat/completions", json=BODY, headers=two)
    refusal(both, 400, "invalid_request", "names 2 roles")
    assert await proxy.recorded(session["session_id"]) == []
    same = [("authorization", f"Bearer {key}"), (ROLE_HEADER, "a" * 64), (ROLE_HEADER, "")]
    assert (await proxy.http.post("/v1/chat/completions", json=BODY, headers=same)).is_success
    assert roles_of(await proxy.recorded(session["session_id"])) == ["a" * 64]


async def test_a_retry_joins_no_other_roles_call(proxy: Proxy, engine: ScriptedEngine) -> None:
    """The bodies are equal, but another agent of the session sends this one."""
    agent, go_on = await left(proxy, engine)
    other = Agent(proxy, engine, {"api_key": agent.key, "session_id": agent.id})
    named = {**other.headers(1), ROLE_HEADER: "critic"}
    go_on.set()
    answer = await proxy.http.post(other.path, content=other.body, headers=named)
    assert answer.status_code == 200 and len(engine.requests) == 2
    found = {one.id: one.role for one in await proxy.recorded(agent.id)}
    assert found[answer.json()["id"]] == "critic"
