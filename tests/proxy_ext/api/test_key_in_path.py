"""A session before the path: what agents' SDKs send beside it."""

from __future__ import annotations

import itertools
from typing import Any

from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start

BODY: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": 4}
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("v1/chat/completions", BODY),
    ("chat/completions", BODY),
    ("v1/messages", BODY),
    ("rl/v1/set_reward", {"reward": 1}),
    ("rl/v1/finalize", {}),
]
DUMMIES: list[dict[str, str]] = [
    {"authorization": "Bearer DUMMY"},
    {"authorization": "Bearer sk-proj-abc"},
    {"authorization": "Bearer sk-v1.0.0123.forged"},
    {"authorization": "Bearer DUMMY", "x-api-key": "another"},
    {"authorization": ""},
]


async def test_a_path_prefix_that_is_no_session_key_means_nothing(proxy: Proxy) -> None:
    for dummy, named in itertools.product(DUMMIES, ("session_id", "api_key")):
        session = await proxy.open()
        for path, body in PATHS:
            response = await proxy.http.post(f"/{session[named]}/{path}", json=body, headers=dummy)
            assert response.status_code == 200, response.text
        assert response.json()["interactions"] == 3


async def test_another_sessions_key_is_refused(proxy: Proxy) -> None:
    session, other = await proxy.open(), await proxy.open()
    await proxy.complete(session["api_key"])
    ways = itertools.product(("session_id", "api_key"), ("authorization", "x-api-key"), PATHS)
    for named, header, (path, body) in ways:
        headers = {header: other["api_key"]}
        response = await proxy.http.post(f"/{session[named]}/{path}", json=body, headers=headers)
        assert response.status_code == 400
        if path != "v1/messages":
            refusal(response, 400, "session_mismatch", "")
        assert other["api_key"] not in response.text
    assert len(await proxy.recorded(session["session_id"])) == 1
    own = {"x-api-key": session["api_key"]}
    path = f"/{session['session_id']}/v1/messages"
    assert (await proxy.http.post(path, json=BODY, headers=own)).status_code == 200


async def test_a_lanes_key_goes_with_its_earlier_session(proxy: Proxy) -> None:
    first = await proxy.open()
    await proxy.complete(first["api_key"])
    await proxy.post("/rl/v1/finalize", {"final_reward": 1}, first["api_key"])
    await proxy.open(api_key=first["api_key"])
    path = f"/{first['session_id']}/rl/v1/set_reward"
    response = await proxy.post(path, {"reward": 2}, first["api_key"])
    assert response.json()["session_id"] == first["session_id"]


async def test_base_urls_may_end_in_v1_once(start: Start) -> None:
    proxy = await start("server.admin_key=operator-secret", admit=10)
    key = (await proxy.open())["api_key"]
    headers = {"authorization": f"Bearer {key}"}
    twice = await proxy.http.post("/v1/v1/chat/completions", json=BODY, headers=headers)
    refusal(twice, 404, "not_found", "one /v1")
    assert key not in twice.text
    # The base URL of an agent ends in /v1, and some clients add their own.
    url = f"/{key}/v1/v1/chat/completions"
    assert (await proxy.http.post(url, json=BODY, headers=headers)).status_code == 200
