"""Users' feedback: a named reward, found by the id of the answer alone."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.auth.access import run_dir_of
from any_agent.auth.key_store import create_key
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start
from tests.support.sessions import finalize, info, played

PATH = "/rl/v1/feedback"
ADMIN = "server.admin_key=operator-secret"


async def give(proxy: Proxy, key: str, **body: Any) -> dict[str, Any]:
    response = await proxy.post(PATH, body, key)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_feedback_is_a_named_reward_with_its_weight(start: Start) -> None:
    proxy = await start("sessions.reward_weights={correct: 1, feedback: 0.5}", admit=10)
    session = await played(proxy)
    id, key, completion = session["session_id"], session["api_key"], session["completion"]
    await proxy.post("/rl/v1/set_reward", {"reward": {"correct": 1}}, key)
    given = await give(proxy, key, completion_id=completion, thumbs="up")
    assert given == {
        "status": "success",
        "session_id": id,
        "interaction_id": completion,
        "reward": 1.5,
    }
    # The last one counts.
    assert (await give(proxy, key, completion_id=completion, thumbs="down"))["reward"] == 0.5
    assert (await give(proxy, key, completion_id=completion, score=0.2))["reward"] == 1.1
    # Without an answer it is the session's.
    assert (await give(proxy, key, score=3))["interaction_id"] is None
    now = await info(proxy, id)
    assert (now["rewards"], now["final_reward"]) == ({completion: 1.1}, 1.5)
    assert [r["name"] for r in now["reward_history"]] == ["correct", *["feedback"] * 4]


async def test_feedback_without_a_weight_is_refused_where_others_have_one(start: Start) -> None:
    proxy = await start("sessions.reward_weights={correct: 1}", admit=10)
    session = await played(proxy)
    response = await proxy.post(PATH, {"thumbs": "up"}, session["api_key"])
    refusal(response, 422, "unknown_reward_name", "feedback")


async def test_an_answers_id_finds_the_session_of_its_tenant_alone(start: Start) -> None:
    proxy = await start(ADMIN, admit=10)
    path = run_dir_of(proxy.service.config).keys
    alice, bob = (create_key(path, "tenant", tenant=name)[0] for name in ("alice", "bob"))
    opened = await proxy.post("/rl/v1/start_session", {}, alice)
    session = opened.json()
    completion = (await proxy.complete(session["api_key"]))["id"]
    body = {"completion_id": completion, "thumbs": "up"}
    assert (await give(proxy, alice, **body))["session_id"] == session["session_id"]
    # Another tenant's and an unknown one are refused alike.
    for id in (completion, "chatcmpl-0000ffff"):
        response = await proxy.post(PATH, {**body, "completion_id": id}, bob)
        refusal(response, 404, "completion_not_found", "")
        assert session["session_id"] not in response.text
    refusal(await proxy.post(PATH, {"thumbs": "up"}, alice), 401, "no_session", "")


async def test_feedback_that_comes_late_is_refused_as_late_rewards_are(proxy: Proxy) -> None:
    session = await played(proxy)
    await finalize(proxy, session, final_reward=1)
    body = {"completion_id": session["completion"], "thumbs": "up"}
    assert (await give(proxy, session["api_key"], **body))["reward"] == 1
    assert len(await proxy.lease()) == 1
    refusal(await proxy.post(PATH, body, session["api_key"]), 410, "session_closed", "")


async def test_a_judges_session_takes_no_feedback_from_its_agent(start: Start) -> None:
    proxy = await start(ADMIN, admit=10)
    session = await played(proxy, rewards="judge")
    body = {"completion_id": session["completion"], "thumbs": "up"}
    refusal(await proxy.post(PATH, body, session["api_key"]), 403, "judge_only", "")
    assert (await give(proxy, session["judge_key"], **body))["reward"] == 1


async def test_one_of_several_choices_must_be_named(proxy: Proxy) -> None:
    session = await proxy.open()
    call = {"messages": HELLO, "n": 2, "max_tokens": 2}
    answer = await proxy.post("/v1/chat/completions", call, session["api_key"])
    id = answer.json()["id"]
    for key in (session["api_key"], None):
        response = await proxy.post(PATH, {"completion_id": id, "thumbs": "up"}, key)
        refusal(response, 400, "choice_needed", "completion_id")
    given = await give(proxy, session["api_key"], completion_id=f"{id}.1", thumbs="up")
    assert given["interaction_id"] == f"{id}.1"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"thumbs": "up", "score": 1},
        {"thumbs": "sideways"},
        {"thumbs": True},
        {"score": "1"},
        {"score": 2e6},
        {"score": {"feedback": 1}},
        {"thumbs": "up", "text": "well done"},
    ],
    ids=str,
)
async def test_bodies_that_are_no_feedback_are_refused(proxy: Proxy, body: dict[str, Any]) -> None:
    session = await played(proxy)
    response = await proxy.post(PATH, body, session["api_key"])
    assert response.status_code == 400, response.text
    assert (await info(proxy, session))["rewards_given"] == 0
