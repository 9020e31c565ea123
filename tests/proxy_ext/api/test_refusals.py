"""What is refused: with which status, and with a message that says what to do."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import httpx

from any_agent.auth.key_store import create_key
from any_agent.launcher.trial import trial_dir
from tests.support.proxy import HELLO, Proxy, signer
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import finalize

CHAT = "/v1/chat/completions"


def refusal(response: httpx.Response, status: int, code: str, says: str = "") -> dict[str, Any]:
    """Check an error answer; the error."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == code, error
    assert says in error["message"], error
    assert set(error) >= {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    if status < 500 and status != 429:
        assert response.headers["x-should-retry"] == "false"
    return error


async def test_bad_calls_reach_no_engine_and_are_not_recorded(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    deep: Any = "x"
    for _ in range(500):
        deep = [deep]
    for change, code, param in (
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": [HELLO[0], 7]}, "invalid_request", "messages[1]"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "", None),
        ({"messages": [{"role": "user", "content": deep}]}, "", None),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"n": 129}, "invalid_request", "n"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"logit_bias": {"999999": 3}}, "invalid_request", "logit_bias"),
        ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
        ({"stream_options": 5}, "invalid_request", "stream_options"),
    ):
        response = await proxy.post(CHAT, {"messages": HELLO, "max_tokens": 2} | change, key)
        error = refusal(response, 400, code or response.json()["error"]["code"], "")
        assert param in (None, error["param"]), error
    assert not engine.requests
    # What continues a recorded call is checked like the first.
    answer = await proxy.complete(key)
    history = [*HELLO, answer["choices"][0]["message"]]
    for new in ("text", 5, None, {"role": "user", "content": 5}, {"role": "zzz", "content": "x"}):
        response = await proxy.call(key, [*history, new])  # type: ignore[list-item]
        assert response.status_code == 400, (new, response.text)
    assert len(await proxy.recorded(session["session_id"])) == len(engine.requests) == 1


async def test_a_grammar_that_the_engine_refuses_is_named_as_the_agent_named_it(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    key = (await proxy.open())["api_key"]
    for name, asked in (("guided_regex", "(a"), ("structured_outputs", {"regex": "(a"})):
        for stream in (False, True):
            response = await proxy.call(key, **{name: asked}, stream=stream)
            error = refusal(response, 400, "invalid_request", "Invalid grammar request")
            assert error["param"] == name and "{" not in error["message"]
    # Other refusals of the engine keep their words.
    engine.fail("status", status=400)
    response = await proxy.call(key, guided_regex="a")
    assert refusal(response, 400, response.json()["error"]["code"], "scripted")["param"] is None


async def test_deep_or_huge_values_cannot_poison_the_record(proxy: Proxy) -> None:
    """What is accepted can be stored, leased and read back; the rest is a 400."""
    session = await proxy.open()
    deep: Any = {}
    for _ in range(800):
        deep = {"a": deep}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    odd: list[dict[str, Any]] = [
        {"metadata": deep},
        {"user": 2**64 - 1},
        {"metadata": {"x": 1e308}},
        {"messages": [{"role": "user", "content": "x", "extra": 2**64 - 1}]},
        {"messages": [{"role": "user", "content": "x", "extra": deep}]},
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call | {"x": deep}]}, HELLO[0]]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]},
    ]
    for change in odd:
        body = {"messages": HELLO, "max_tokens": 2} | change
        response = await proxy.post(CHAT, body, session["api_key"])
        assert response.status_code in (200, 400), (change.keys(), response.text)
    await proxy.complete(session["api_key"])
    await finalize(proxy, session, final_reward=1)
    recorded = await proxy.recorded(session["session_id"])
    (trajectory,) = await proxy.lease()
    assert [i.id for i in trajectory.interactions] == [i.id for i in recorded]


async def test_bad_opens_take_no_slot(proxy: Proxy) -> None:
    for body, param in (
        ({"task": "x"}, "task"),
        ({"mode": "test"}, "mode"),
        ({"task_id": "../x"}, "task_id"),
        ({"group_id": "x" * 65}, "group_id"),
        ({"group_size": 0, "group_id": "g"}, "group_size"),
        ({"group_size": 4}, "group_size"),
        ({"group_size": 9, "group_id": "g"}, "group_size"),
        ({"ttl": 0}, "ttl"),
        ({"wait": -1}, "wait"),
        ({"metadata": {"x": "y" * 70_000}}, "metadata"),
        ({"metadata": 5}, "metadata"),
    ):
        response = await proxy.post("/rl/v1/start_session", body)
        error = refusal(response, 400, "invalid_request", "")
        assert error["param"] == param or param in error["message"], (body, error)
    assert (await proxy.capacity())["admitted"] == 0
    # Without any body it is opened.
    for response in (
        await proxy.http.post("/rl/v1/start_session"),
        await proxy.http.get("/rl/v1/start_session", params={"mode": "eval", "task_id": "t"}),
    ):
        assert response.status_code == 200, response.text


async def test_bad_rewards_change_nothing(proxy: Proxy) -> None:
    session, other = await proxy.open(), await proxy.open()
    key = session["api_key"]

    async def reward(body: Any, path: str = "set_reward") -> httpx.Response:
        return await proxy.post(f"/rl/v1/{path}", body, key)

    refusal(await reward({"reward": 1}), 422, "no_interactions", "")
    refusal(await reward({"final_reward": 1}, "finalize"), 422, "no_interactions", "")
    completion = (await proxy.complete(key))["id"]
    foreign = (await proxy.complete(other["api_key"]))["id"]
    for body in (
        b'{"reward": NaN}',
        b'{"reward": Infinity}',
        b'{"reward": 1e999}',
        b'{"reward": 1' + b"0" * 400 + b"}",
        {"reward": "1.0"},
        {"reward": None},
        {"reward": True},
        {},
        {"reward": 1, "step": 2},
    ):
        code = "invalid_json" if isinstance(body, bytes) else "invalid_request"
        refusal(await reward(body), 400, code, "")
    for value in (1.000001e6, -1.000001e6, 1e300, -(10**9)):
        # Finite, and yet one of them could make the loss of a whole batch infinite.
        for path, field in (("set_reward", "reward"), ("finalize", "final_reward")):
            refusal(await reward({field: value}, path), 400, "invalid_request", "1e+06")
    refusal(await reward(b'{"final_reward": NaN}', "finalize"), 400, "invalid_json", "")
    refusal(await reward({"final_reward": "1"}, "finalize"), 400, "invalid_request", "")
    for id in ("no-such-completion", foreign):
        unknown = await reward({"reward": 1, "completion_id": id})
        refusal(unknown, 404, "completion_not_found", id)
    two = {"reward": 1, "completion_id": completion, "interaction_id": "x"}
    refusal(await reward(two), 400, "invalid_request", "different")
    refusal(await reward({}, "finalize"), 422, "no_reward", "final_reward")
    assert [one.reward for one in await proxy.recorded(session["session_id"])] == [None]
    for value in (1e6, -1e6, -2):
        response = await reward({"reward": value})
        assert response.status_code == 200, response.text
    assert response.json() == {
        "status": "success",
        "session_id": session["session_id"],
        "interaction_id": completion,
        "reward": -2.0,
    }


async def test_a_finished_session_is_sealed(proxy: Proxy, engine: ScriptedEngine) -> None:
    for mode in ("train", "eval"):
        train, session = mode == "train", await proxy.finished_session(mode=mode)
        key, before = session["api_key"], len(engine.requests)
        # A train session's rewards may be revised until a trainer has it.
        assert len(await proxy.lease()) == int(train)
        for response in (
            await proxy.call(key),
            await proxy.call(key, stream=True),
            await proxy.post("/rl/v1/set_reward", {"reward": 5}, key),
            await proxy.post("/rl/v1/set_reward", {"final_reward": 5}, key),
        ):
            error = refusal(response, 410, "session_closed", "start a new session")
            assert error["state"] == ("leased" if train else "evaluated")
        other = await proxy.post("/rl/v1/finalize", {"final_reward": 5}, key)
        refusal(other, 409, "already_finalized", "final reward 1")
        aborted = await proxy.post(f"/rl/v1/sessions/{session['session_id']}/abort", {}, key)
        advice = "cannot be taken out" if train else "nothing to abort"
        refusal(aborted, 410, "session_closed", advice)
        assert len(engine.requests) == before
        (interaction,) = await proxy.recorded(session["session_id"])
        assert interaction.reward is None


async def test_calls_without_a_session_or_with_a_wrong_key_are_refused(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    key = (await proxy.open())["api_key"]
    prefix, rank, lane, mac = key.rsplit(".", 3)
    refusal(await proxy.call(None), 401, "no_session", "start_session")
    for bad in (
        key[:-1],
        key + "0",
        f"{prefix}.{rank}.{lane}.{'0' * 32}",
        f"{prefix}.{rank}.{'0' * 24}.{mac}",
        f"{prefix}.7.{lane}.{mac}",
        f"{prefix}.{rank}.{lane}.{mac[:16]}",
        "sk-v1.",
        "sk-v1.٠." + lane + "." + mac,
        signer(proxy).mint(0)[1],
    ):
        if bad.isascii():
            refusal(await proxy.call(bad), 401, "invalid_api_key", "")
        response = await proxy.post(f"/{bad}{CHAT}", {"messages": HELLO})
        refusal(response, 401, "invalid_api_key", "")
    response = await proxy.post(f"/ses-0-nothere{CHAT}", {"messages": HELLO})
    refusal(response, 404, "session_not_found", "ses-0-nothere")
    assert engine.requests == []


async def test_a_request_that_names_two_sessions_is_refused(proxy: Proxy) -> None:
    one, two = await proxy.open(), await proxy.open()
    key, other = one["api_key"], two["session_id"]
    named, talk = {"x-any-agent-session": other}, {"messages": HELLO}
    calls = [
        proxy.post(CHAT, talk, key, **named),
        proxy.post(CHAT, talk, key, **{"x-api-key": two["api_key"]}),
        proxy.post(f"/{key}{CHAT}", talk, **named),
        proxy.post("/rl/v1/set_reward", {"reward": 1, "session_id": other}, key),
        proxy.post(f"{CHAT}?session_id={other}", talk, key),
        proxy.post(f"/rl/v1/finalize?session_id={other}", {"final_reward": 1}, key),
        proxy.post(f"/rl/v1/finalize?session_id={other}", {"session_id": one["session_id"]}),
    ]
    for response in await asyncio.gather(*calls):
        refusal(response, 400, "session_mismatch", "")
    for session in (one, two):
        assert await proxy.recorded(session["session_id"]) == []
    # The same session named twice is no contradiction.
    same = await proxy.post(CHAT, talk, key, **{"x-any-agent-session": one["session_id"]})
    assert same.status_code == 200


async def test_bodies_over_the_limit_are_refused(start: Start) -> None:
    proxy = await start("server.max_body_bytes=4096", admit=5)
    session = await proxy.open()
    big = b'{"messages": "' + b"x" * 5000 + b'"}'

    async def pieces() -> Any:
        for at in range(0, len(big), 1000):
            yield big[at : at + 1000]

    headers = {"Authorization": f"Bearer {session['api_key']}", "content-type": "application/json"}
    for path in (CHAT, "/rl/v1/set_reward"):
        for content in (big, pieces()):
            response = await proxy.http.post(path, content=content, headers=headers)
            refusal(response, 413, "payload_too_large", "max_body_bytes")
    assert (await proxy.call(session["api_key"])).status_code == 200
    many = {f"x-{k}": "y" * 1000 for k in range(40)}
    response = await proxy.http.get("/v1/models", headers=many)
    assert response.status_code in (400, 413, 431)


async def test_with_an_admin_key_an_id_alone_opens_nothing(start: Start) -> None:
    proxy = await start("server.admin_key=operator-secret", admit=5)
    session, other = await proxy.open(), await proxy.open()
    key, id = session["api_key"], session["session_id"]
    body = {"messages": HELLO, "max_tokens": 2}
    async with httpx.AsyncClient(base_url=proxy.url) as stranger:
        for response in (
            await stranger.post(CHAT, json=body),
            await stranger.post(CHAT, json=body, headers={"x-any-agent-session": id}),
            await stranger.post(f"/{id}{CHAT}", json=body),
            await stranger.post("/rl/v1/finalize", json={"session_id": id, "final_reward": 1}),
            await stranger.get(f"/rl/v1/sessions/{id}"),
        ):
            refusal(response, 401, response.json()["error"]["code"], "")
        # A page elsewhere may be the agent: keys, not origins, decide now.
        answer = await stranger.post(f"/{key}{CHAT}", json=body, headers={"host": "gpu.example"})
        assert answer.status_code == 200, answer.text
        # One session's key sees nothing of another's.
        theirs = {"Authorization": f"Bearer {other['api_key']}"}
        hidden = await stranger.get(f"/rl/v1/sessions/{id}", headers=theirs)
        refusal(hidden, 404, "session_not_found", "")
    # The operator may name any session.
    response = await proxy.post(CHAT, body, **{"x-any-agent-session": id})
    assert response.status_code == 200


async def test_no_route_of_litellm_is_served_beside_the_listed_ones(proxy: Proxy) -> None:
    for path in (
        "/settings",
        "/routes",
        "/debug/memory",
        "/key/generate",
        "/ui",
        "//settings",
        "/v1/settings",
        "/health/liveliness/../../settings",
    ):
        for method in ("GET", "POST"):
            response = await proxy.http.request(method, path)
            refusal(response, 404, "not_found", "no route")
    response = await proxy.http.get(CHAT)
    assert response.status_code == 405


async def test_health_needs_no_key_and_liveness_takes_any(start: Start) -> None:
    proxy = await start("server.admin_key=operator-secret")
    tenant, _ = create_key(trial_dir(proxy.service.config).keys, "tenant", tenant="alice")
    session = await proxy.open(mode="eval")
    keys = ("operator-secret", tenant, session["api_key"], "sk-v1.0.forged", "")
    async with httpx.AsyncClient(base_url=proxy.url) as http:
        for key, path in itertools.product(keys, ("/health/liveliness", "/health/liveness")):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            response = await http.get(path, headers=headers)
            assert (response.status_code, response.json()) == (200, "I'm alive!")
        assert (await http.get("/healthz")).json()["status"] == "ok"
        assert (await http.get("/readyz")).json() == {"status": "ready", "version": 0}
