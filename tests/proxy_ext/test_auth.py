"""Keys of tenants, trainers and operators at a running proxy."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from any_agent.auth.key_store import KeptScope, create_key, revoke_key
from any_agent.errors import StartupError
from any_agent.launcher.trial import trial_dir
from proxy_ext.web import permissions as scopes
from tests.support.errors import fails_with
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Start

CHAT = "/v1/chat/completions"
ADMIN = "server.admin_key=operator-secret"


def keys_of(proxy: Proxy) -> Path:
    return trial_dir(proxy.service.config).keys


def made(proxy: Proxy, scope: KeptScope = "tenant", **fields: Any) -> str:
    return create_key(keys_of(proxy), scope, **fields)[0]


async def asked(
    proxy: Proxy, method: str, path: str, key: str = "", body: Any = None, **headers: str
) -> httpx.Response:
    """With this key alone."""
    if key:
        headers["authorization"] = f"Bearer {key}"
    async with httpx.AsyncClient(base_url=proxy.url, timeout=60) as http:
        return await http.request(method, path, json=body, headers=headers)


async def opened(proxy: Proxy, key: str, **body: Any) -> dict[str, Any]:
    response = await asked(proxy, "POST", "/rl/v1/start_session", key, body)
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.fixture
async def closed(start: Start) -> Proxy:
    """With an admin key, and room for sessions."""
    proxy = await start(ADMIN)
    await proxy.admit(1000)
    return proxy


async def test_a_tenant_has_its_own_sessions(closed: Proxy) -> None:
    alice, bob = made(closed, tenant="alice"), made(closed, tenant="bob")
    hers, his = await opened(closed, alice), await opened(closed, bob)
    for key, session in ((alice, hers), (bob, his)):
        response = await asked(closed, "GET", "/rl/v1/sessions", key)
        assert [s["session_id"] for s in response.json()] == [session["session_id"]]
    # Without any session's key: model calls, rewards and the end name the session.
    named = {"x-any-agent-session": hers["session_id"]}
    body = {"messages": HELLO, "max_tokens": 2}
    assert (await asked(closed, "POST", CHAT, alice, body, **named)).status_code == 200
    response = await asked(closed, "POST", CHAT, alice, body)
    assert response.status_code == 401 and response.json()["error"]["code"] == "no_session"
    ending = {"session_id": hers["session_id"], "final_reward": 1.0}
    for key, status in ((bob, 404), (alice, 200)):
        response = await asked(closed, "POST", "/rl/v1/finalize", key, ending)
        assert response.status_code == status, response.text
    row = await closed.service.journal.session(hers["session_id"])
    assert row is not None and row.tenant == "alice"
    assert row.opened_by is not None and row.opened_by.startswith("tenant alice (key ")
    assert alice not in str(row)


async def test_a_session_of_another_tenant_is_answered_as_unknown(closed: Proxy) -> None:
    """The answer is the same, but for the name."""
    alice, bob = made(closed, tenant="alice"), made(closed, tenant="bob")
    hers, his = await opened(closed, alice), await opened(closed, bob)
    there, absent = hers["session_id"], f"ses-0-{'0' * 16}"
    for key in (bob, his["api_key"]):
        for method, path, header in (
            ("GET", "/rl/v1/sessions/{}", ""),
            ("POST", "/rl/v1/sessions/{}/abort", ""),
            ("DELETE", "/rl/v1/sessions/{}", ""),
            ("POST", "/rl/v1/finalize?session_id={}", ""),
            ("POST", CHAT, "{}"),
        ):
            answers = []
            for id in (there, absent):
                headers = {"x-any-agent-session": header.format(id)} if header else {}
                body = {"messages": HELLO} if header else {}
                r = await asked(closed, method, path.format(id), key, body, **headers)
                answers.append((r.status_code, r.text.replace(id, "ID")))
            assert answers[0] == answers[1], (method, path)
            assert answers[0][0] in (400, 404)
    response = await asked(closed, "GET", f"/rl/v1/sessions/{there}", alice)
    assert response.json()["state"] == "open"
    # Names that are keys are never repeated.
    for name in (bob, his["api_key"][:-1] + "x", "sk-what-is-this"):
        response = await asked(closed, "POST", CHAT, alice, {}, **{"x-any-agent-session": name})
        assert response.status_code in (401, 404) and name not in response.text


async def test_the_first_admin_key_closes_an_open_service(start: Start) -> None:
    proxy = await start()
    await proxy.admit(5)
    assert (await asked(proxy, "GET", "/rl/v1/capacity")).status_code == 200
    # An image or a form on a page carries no Origin.
    pages = ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"})
    for page in pages:
        assert (await asked(proxy, "GET", "/healthz", **page)).status_code == 403
    session = await proxy.open()
    key = made(proxy, "admin")

    async def is_closed() -> bool:
        return (await asked(proxy, "GET", "/rl/v1/capacity")).status_code == 401

    await until(is_closed, "the end of open mode")
    assert (await asked(proxy, "GET", "/rl/v1/capacity", "DUMMY")).status_code == 401
    assert (await asked(proxy, "GET", "/rl/v1/capacity", key)).status_code == 200
    for page in pages:
        assert (await asked(proxy, "GET", "/healthz", **page)).status_code == 200
    tenant, kept = create_key(keys_of(proxy), "tenant", tenant="alice")
    assert (await asked(proxy, "GET", "/rl/v1/run", tenant)).status_code == 200
    revoke_key(keys_of(proxy), kept.id)

    async def is_revoked() -> bool:
        return (await asked(proxy, "GET", "/rl/v1/run", tenant)).status_code == 401

    await until(is_revoked, "the end of the tenant's key")
    assert (await proxy.call(session["api_key"])).status_code == 200
    by_id = await asked(proxy, "POST", f"/{session['session_id']}{CHAT}", "", {"messages": HELLO})
    assert by_id.status_code == 401, "ids are worth nothing now"


TRAINERS_ROUTES = (
    ("PUT", "/rl/v1/run"),
    ("POST", "/rl/v1/version"),
    ("POST", "/rl/v1/pause"),
    ("POST", "/rl/v1/resume"),
    ("GET", "/rl/v1/capacity"),
    ("PUT", "/rl/v1/capacity"),
    ("POST", "/rl/v1/lease"),
    ("POST", "/rl/v1/ack"),
    ("POST", "/rl/v1/export_trajectories"),
    ("POST", "/grant_capacity"),
    ("POST", "/export_trajectories"),
    ("GET", "/metrics"),
)
OPENERS_ROUTES = (
    ("POST", "/rl/v1/start_session"),
    ("GET", "/rl/v1/start_session"),
    ("POST", "/rl/start_session"),
    ("GET", "/rl/v1/sessions"),
    ("GET", "/rl/v1/sessions/{}/interactions"),
    ("GET", "/rl/v1/sessions/{}/interactions/x/tokens"),
)


async def test_agents_and_judges_are_refused_where_trainers_and_operators_act(
    closed: Proxy,
) -> None:
    """By names that are written here, and not by the table that the proxy goes by."""
    session = await opened(closed, made(closed, tenant="alice"), rewards="judge")
    own, judge = session["api_key"], session["judge_key"]
    tried = [(key, route) for key in (own, judge) for route in TRAINERS_ROUTES + OPENERS_ROUTES]
    tried += [(made(closed, tenant="alice"), route) for route in TRAINERS_ROUTES]
    for key, (method, path) in tried:
        path = path.format(session["session_id"])
        body = None if method == "GET" else {}
        answer = await asked(closed, method, path, key, body)
        assert answer.status_code == 403, (method, path, answer.text)
        assert answer.json()["error"]["code"] == "forbidden"


async def test_no_key_is_printed_or_given_to_a_log(
    start: Start, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not even where the log's own filter would cut it."""
    caplog.set_level(logging.DEBUG)
    proxy = await start(ADMIN)
    await proxy.admit(10)
    tenant = made(proxy, tenant="alice")
    session = await opened(proxy, tenant, rewards="judge")
    keys = (session["api_key"], session["judge_key"], tenant, "operator-secret")
    await proxy.complete(session["api_key"])
    for key in keys:
        for path in ("/rl/v1/run", "/rl/v1/sessions", "/rl/v1/capacity", "/v1/none"):
            await asked(proxy, "GET", path, key)
    reward = {"session_id": session["session_id"], "reward": 1.0}
    await asked(proxy, "POST", "/rl/v1/set_reward", session["judge_key"], reward)
    await asked(proxy, "POST", "/rl/v1/finalize", session["judge_key"], reward)
    # The client's library, which is the test's own, logs its headers.
    ours = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    printed = capfd.readouterr()
    text = "\n".join([*(r.getMessage() for r in ours), printed.out, printed.err])
    for key in keys:
        assert key not in text


async def test_refusals_do_not_wait_for_the_body(closed: Proxy) -> None:
    """A megabyte was announced, and nothing of it sent."""
    session = await closed.open()
    for key, status in (("", 401), ("garbage-key", 401), (session["api_key"], 403)):
        head = "POST /rl/v1/start_session HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
        head += f"Authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(closed.url.rpartition(":")[2])
        )
        writer.write(head.encode())
        async with asyncio.timeout(60):
            line = await reader.readline()
        assert line.startswith(f"HTTP/1.1 {status} ".encode()), line
        writer.close()


async def test_other_spellings_of_a_path_open_no_route_beside_its_scopes(closed: Proxy) -> None:
    """What a framework may take for one of our routes is none, or is held to the table."""
    for path in (
        "/rl/v1/capacity/",
        "/rl/v1/capacity%0A",
        "//rl/v1/capacity",
        "/RL/v1/capacity",
        "/rl/v1/capacity;x",
        "/rl/v1/sessions/a/b",
        "/rl/v1/sessions/",
        "/rl/v1/sessions//abort",
        "/rl/v1/../v1/capacity",
    ):
        with socket.create_connection(("127.0.0.1", int(closed.url.rpartition(":")[2]))) as wire:
            wire.sendall(f"GET {path} HTTP/1.0\r\nHost: x\r\n\r\n".encode())
            answer = await asyncio.to_thread(wire.recv, 1000)
        assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 401 ")), (path, answer)
    assert (await asked(closed, "PUT", "/rl/v1/lease")).status_code == 405
    response = await asked(closed, "GET", "/sk-tenant.00000000.1234567890abcdef1234567890")
    assert response.status_code == 404 and "1234567890" not in response.text


def test_a_route_without_a_scope_is_an_error() -> None:
    from fastapi import FastAPI

    app = FastAPI()
    app.add_api_route("/rl/v1/new", lambda: None, methods=["POST"])
    with fails_with(StartupError, "POST /rl/v1/new"):
        scopes.check_routes(app.routes)


async def test_a_key_has_no_place_in_a_url(proxy: Proxy) -> None:
    key = (await proxy.finished_session(mode="eval"))["api_key"]
    response = await proxy.http.get("/rl/v1/start_session", params={"api_key": key, "mode": "eval"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "api_key"
    assert key not in response.text
    assert not proxy.service.sessions.live
