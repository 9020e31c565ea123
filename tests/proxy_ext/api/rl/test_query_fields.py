"""What stands in a URL's query means what it means in a body, on every `/rl` route."""

from __future__ import annotations

import itertools
import json
from typing import Any
from urllib.parse import urlencode

import httpx
from fastapi.routing import APIRoute, iter_route_contexts

from any_agent.types import SessionState
from proxy_ext.api.openapi.build import load_description
from proxy_ext.api.rl.strict_body import QueryFields, merge_fields
from tests.support.proxy import HELLO, Proxy, our_app

EXAMPLES = load_description()["examples"]
ROUTES: dict[str, APIRoute] = {
    route.dependant.body_params[0].field_info.annotation.__name__: route
    for context in iter_route_contexts(our_app().routes)
    if isinstance(route := context.original_route, APIRoute) and route.dependant.body_params
}
"""One for each kind of body."""


def refused(response: httpx.Response, param: str | None) -> None:
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def query_of(body: dict[str, Any]) -> str:
    """A body as somebody would write it into a URL."""
    texts = [
        (name, one if isinstance(one, str) else json.dumps(one))
        for name, value in body.items()
        for one in (value if isinstance(value, list) else [value])
    ]
    return urlencode(texts)


async def test_every_body_can_stand_in_a_query() -> None:
    assert ROUTES.keys() - EXAMPLES.keys() == {"ArealEnd"}, "every kind of body is tried"
    for name in EXAMPLES.keys() & ROUTES.keys():
        fields = QueryFields(ROUTES[name].dependant)
        body = EXAMPLES[name]
        path = {field.alias: "s" for field in ROUTES[name].dependant.path_params}
        said = await fields.parse(query_of(body), path)
        assert merge_fields({}, said) == merge_fields(body, said) == said == body, name


# -- the documents' signatures ---------------------------------------------------------------------


async def test_a_whole_episode_can_be_asked_for_in_urls(proxy: Proxy) -> None:
    opened = await proxy.http.post("/rl/v1/start_session?mode=eval&ttl=60&metadata={%22a%22:1}")
    session = opened.json()
    assert (session["mode"], session["expires_in"]) == ("eval", 60)
    live = proxy.service.sessions.live[session["session_id"]]
    assert live.row.metadata == {"a": 1}
    completion = await proxy.complete(session["api_key"])
    named = f"session_id={session['session_id']}"
    given = await proxy.http.post(
        f"/rl/v1/set_reward?{named}&completion_id={completion['id']}&reward=0.5"
    )
    assert given.json() == {
        "status": "success",
        "session_id": session["session_id"],
        "interaction_id": completion["id"],
        "reward": 0.5,
    }
    final = await proxy.http.post(f"/rl/v1/finalize?{named}&final_reward=1.0")
    assert final.json()["status"] == "success"
    assert (final.json()["state"], final.json()["final_reward"]) == ("evaluated", 1.0)


async def test_a_whole_episode_of_areal_can_be_asked_for_in_urls(proxy: Proxy) -> None:
    await proxy.http.post("/grant_capacity?task_id=t")
    opened = (await proxy.http.post("/rl/start_session?task_id=t")).json()
    assert opened["session_id"] == "t-0-0"
    await proxy.complete(opened["api_key"])
    given = await proxy.http.post("/rl/set_reward?session_id=t-0-0&reward=-2")
    assert given.json() == {"message": "success"}
    ended = await proxy.http.post("/rl/end_session?session_id=t-0-0")
    assert ended.json()["interaction_count"] == 1
    out = await proxy.http.post("/export_trajectories?session_id=t-0-0&discount=0.5&style=concat")
    ((_, one),) = out.json()["interactions"].items()
    assert one["reward"] == -2


async def test_rewards_by_name_are_json_and_trainers_speak_in_urls_too(proxy: Proxy) -> None:
    session = await proxy.open()
    await proxy.complete(session["api_key"])
    set_to = await proxy.http.put("/rl/v1/capacity?limit=7&ttl=60&owner=me&held=a&held=b")
    assert set_to.json()["limit"] == 7
    assert (await proxy.http.post("/rl/v1/lease?owner=me&wait=0")).status_code == 204
    assert (await proxy.http.post("/rl/v1/pause?ttl=30")).status_code == 200
    assert (await proxy.http.post("/rl/v1/resume")).status_code == 200
    query = urlencode({"session_id": session["session_id"], "final_reward": '{"a": 1, "b": 0.5}'})
    response = await proxy.http.post(f"/rl/v1/finalize?{query}")
    assert response.json()["final_reward"] == 1.5


# -- both, and neither -----------------------------------------------------------------------------


async def test_a_refused_query_changes_nothing(proxy: Proxy) -> None:
    session = await proxy.open()
    key = session["api_key"]
    await proxy.complete(key)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("reward=1", {"reward": 0.5}, "reward"),
        ("reward=1", {"reward": True}, "reward"),
        ("reward=1&reward=2", {}, "reward"),
        *((f"reward={value}", {}, "reward") for value in ("nan", "-Infinity", "1e400", "much")),
        *((f"reward={value}", {}, "reward") for value in ("1_0", "%D9%A1", "%201", "")),
        ("reward={%22a%22:NaN}", {}, "reward"),
        ("reward=1&completion_id=", {}, "completion_id"),
        ("reward=1&rewrad=1", {}, "rewrad"),
        ("reward=1&api_key=sk-v1.0.x", {}, "api_key"),
    ]
    for query, body, param in cases:
        response = await proxy.post(f"/rl/v1/set_reward?{query}", body, key)
        refused(response, param)
        assert "sk-v1" not in response.text
    assert not proxy.service.rewards.given
    # Body and query may say the same.
    for same in (1, 1.0):
        path = f"/rl/v1/set_reward?reward=1&session_id={session['session_id']}"
        response = await proxy.post(path, {"reward": same, "session_id": None}, key)
        assert response.json()["reward"] == 1


async def test_different_sessions_in_url_and_body_are_refused(proxy: Proxy) -> None:
    first, second = await proxy.open(), await proxy.open()
    response = await proxy.post(
        f"/rl/v1/finalize?session_id={first['session_id']}", {"session_id": second["session_id"]}
    )
    refused(response, "session_id")
    assert response.json()["error"]["code"] == "session_mismatch"
    path = f"/rl/v1/sessions/{first['session_id']}/abort"
    refused(await proxy.post(f"{path}?session_id={second['session_id']}", {}), "session_id")
    same = await proxy.post(f"{path}?session_id={first['session_id']}&reason=late", {})
    assert (same.json()["state"], same.json()["reason"]) == ("aborted", "late")
    live = proxy.service.sessions.live
    assert [s.state for s in live.values()] == [SessionState.OPEN]


async def test_reads_and_opens_by_get_are_as_strict(proxy: Proxy) -> None:
    for path in (
        "sessions?stat=open",
        "run?sesion_id=x",
        "capacity?x=1",
        "version?x=1",
        "start_session?mod=eval",
        *(f"sessions?limit={number}" for number in ("1_0", "", "%201")),
        *(f"start_session?{field}" for field in ("ttl=nan", "wait=inf", "api_key=sk-v1.0.x")),
    ):
        response = await proxy.http.get(f"/rl/v1/{path}")
        refused(response, path.partition("?")[2].partition("=")[0])
    no_object = await proxy.post("/rl/v1/start_session?mode=eval", b"[]")
    assert no_object.status_code == 400
    assert not proxy.service.sessions.live


async def test_a_read_may_name_its_session(proxy: Proxy) -> None:
    first, second = await proxy.open(), await proxy.open()
    bearer = {"Authorization": f"Bearer {first['api_key']}"}
    ways = (bearer, {"X-Any-Agent-Session": first["session_id"]}, {})
    for path, headers in itertools.product(("run", "version"), ways):
        url = f"/rl/v1/{path}?session_id="
        same = await proxy.http.get(url + first["session_id"], headers=headers)
        assert same.status_code == 200, same.text
        if headers:
            other = await proxy.http.get(url + second["session_id"], headers=headers)
            assert other.status_code == 400
            assert other.json()["error"]["code"] == "session_mismatch"
    assert (await proxy.http.get("/rl/v1/run?session_id=none")).status_code == 404


async def test_a_session_named_at_a_route_that_needs_none_is_accepted(proxy: Proxy) -> None:
    first, second = await proxy.open(), await proxy.open()
    path = f"/rl/v1/start_session?mode=eval&session_id={second['session_id']}"
    response = await proxy.post(path, {}, **{"X-Any-Agent-Session": first["session_id"]})
    refused(response, None)
    assert len(proxy.service.sessions.live) == 2
    for path in ("sessions", "capacity"):
        named = f"/rl/v1/{path}?session_id={first['session_id']}"
        assert (await proxy.http.get(named)).status_code == 200
    limited = await proxy.http.get(f"/rl/v1/sessions?session_id={first['session_id']}&limit=1")
    assert len(limited.json()) == 1
    refused(await proxy.http.get("/rl/v1/capacity?session_id="), "session_id")


async def test_an_idempotency_key_treats_query_and_body_fields_alike(proxy: Proxy) -> None:
    headers = {"Idempotency-Key": "k"}

    async def ask(query: str, body: dict[str, Any]) -> httpx.Response:
        return await proxy.post(f"/rl/v1/start_session{query}", body, **headers)

    first = await ask("?task_id=t&mode=eval", {})
    assert first.status_code == 200
    for query, body in (
        ("?mode=eval&task_id=t", {}),
        ("?mode=eval", {"task_id": "t"}),
        ("", {"mode": "eval", "task_id": "t"}),
    ):
        assert (await ask(query, body)).content == first.content
    other = await ask("?task_id=u&mode=eval", {})
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")
    assert len(proxy.service.sessions.live) == 1


async def test_model_calls_take_other_clients_parameters(proxy: Proxy) -> None:
    """Azure's SDK sends an api-version: that stops no agent."""
    session = await proxy.open()
    body = {"model": "m", "messages": HELLO, "max_tokens": 4}
    path = f"/v1/chat/completions?api-version=2024-06-01&session_id={session['session_id']}"
    response = await proxy.post(path, body)
    assert response.headers["x-any-agent-session"] == session["session_id"]
