"""Users' feedback: a named reward, and words, found by the id of the answer alone."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.auth.access import run_dir_of
from any_agent.auth.key_store import create_key
from proxy_ext.journal import SetReward
from proxy_ext.sessions.rewards import MAX_TEXTS
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start
from tests.support.sessions import finalize, info, played, unwritable

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
        "text_stored": False,
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
        {"completion_id": None, "text": None},
        {"thumbs": "up", "score": 1},
        {"thumbs": "up", "score": 1, "text": "both"},
        {"thumbs": "sideways"},
        {"thumbs": True},
        {"score": "1"},
        {"score": 2e6},
        {"score": {"feedback": 1}},
        {"thumbs": "up", "text": ""},
        {"text": 5},
        {"text": ["well done"]},
        {"text": "a" * 4097},
        {"thumbs": "up", "words": "well done"},
    ],
    ids=str,
)
async def test_bodies_that_are_no_feedback_are_refused(proxy: Proxy, body: dict[str, Any]) -> None:
    session = await played(proxy)
    response = await proxy.post(PATH, body, session["api_key"])
    assert response.status_code == 400, response.text
    now = await info(proxy, session)
    assert (now["rewards_given"], now["reward_history"]) == (0, [])


HOSTILE = "\0 <script>x</script> \u202e \x1b[2J ' ; DROP TABLE rewards; -- \U0001f44e"


async def test_words_are_kept_beside_the_value_and_alone_set_no_reward(
    start: Start, proxy: Proxy
) -> None:
    session = await played(proxy)
    key, completion = session["api_key"], session["completion"]
    alone = await give(proxy, key, completion_id=completion, text=HOSTILE)
    assert (alone["reward"], alone["text_stored"]) == (None, True)
    response = await proxy.post("/rl/v1/finalize", {}, key)
    refusal(response, 422, "no_reward", "")
    both = await give(proxy, key, completion_id=completion, thumbs="down", text="Wrong.")
    assert (both["reward"], both["interaction_id"]) == (-1, completion)
    # Words alone change no reward that is there.
    last = await give(proxy, key, completion_id=completion, text="a" * 4096)
    assert last["reward"] == -1
    assert (await give(proxy, key, score=0.5))["text_stored"] is False
    # As a process reads it that is started after a kill.
    for each in (proxy, await start()):
        now = await info(each, session)
        assert (now["rewards"], now["final_reward"]) == ({completion: -1}, 0.5)
        assert now["rewards_given"] == 2
        given = [
            (one["interaction_id"], one["value"], one["text"]) for one in now["reward_history"]
        ]
        assert given == [
            (completion, None, HOSTILE),
            (completion, -1, "Wrong."),
            (completion, None, "a" * 4096),
            (None, 0.5, None),
        ]


async def test_a_repeated_request_gives_its_words_once(proxy: Proxy) -> None:
    session = await played(proxy)
    key = {"authorization": f"Bearer {session['api_key']}", "idempotency-key": "once"}
    answers = [await proxy.http.post(PATH, json={"text": "Thanks."}, headers=key) for _ in range(3)]
    assert {answer.content for answer in answers} == {answers[0].content}
    assert [one["text"] for one in (await info(proxy, session))["reward_history"]] == ["Thanks."]


async def test_words_that_cannot_be_written_are_not_acknowledged(proxy: Proxy) -> None:
    session = await played(proxy)
    with unwritable(proxy.service.journal, SetReward):
        response = await proxy.post(PATH, {"text": "Thanks."}, session["api_key"])
        assert response.status_code == 503
    assert (await info(proxy, session))["reward_history"] == []


async def test_a_run_that_stores_no_texts_keeps_the_value_alone(start: Start) -> None:
    proxy = await start("sessions.store_content=false", admit=10)
    session = await played(proxy)
    response = await proxy.post(PATH, {"text": "planted"}, session["api_key"])
    refusal(response, 409, "content_not_stored", "sessions.store_content")
    given = await give(proxy, session["api_key"], thumbs="up", text="planted")
    assert (given["reward"], given["text_stored"]) == (1, False)
    files = [path for path in proxy.service.config.root.rglob("*") if path.is_file()]
    assert not [path for path in files if b"planted" in path.read_bytes()]
    (entry,) = (await info(proxy, session))["reward_history"]
    assert (entry["value"], entry["text"]) == (1, None)


async def test_a_session_takes_a_bounded_number_of_texts(proxy: Proxy) -> None:
    session = await played(proxy)
    for number in range(MAX_TEXTS):
        await give(proxy, session["api_key"], text=f"{number}")
    response = await proxy.post(PATH, {"thumbs": "up", "text": "more"}, session["api_key"])
    refusal(response, 422, "too_many_feedback_texts", "text")
    assert (await give(proxy, session["api_key"], thumbs="up"))["reward"] == 1
    now = await info(proxy, session)
    assert (now["rewards_given"], len(now["reward_history"])) == (1, MAX_TEXTS + 1)


async def test_an_agent_gives_its_judge_no_words_and_reads_none(start: Start) -> None:
    proxy = await start(ADMIN, admit=10)
    session = await played(proxy, rewards="judge")
    key = session["api_key"]
    refusal(await proxy.post(PATH, {"text": "A+"}, key), 403, "judge_only", "")
    await give(proxy, session["judge_key"], text="It is Lisbon.")
    await give(proxy, session["judge_key"], score=0.5, text="Nearly Lisbon.")
    path = f"/rl/v1/sessions/{session['session_id']}"
    seen = {
        who: await proxy.http.get(path, headers={"authorization": f"Bearer {key}"})
        for who, key in (("agent", key), ("judge", session["judge_key"]))
    }
    assert "Lisbon" not in seen["agent"].text
    assert [one["value"] for one in seen["agent"].json()["reward_history"]] == [0.5]
    assert [one["value"] for one in seen["judge"].json()["reward_history"]] == [None, 0.5]
    assert seen["judge"].text.count("Lisbon") == 2


async def test_no_key_that_an_agent_has_too_reads_its_judges_words(start: Start) -> None:
    grader = "sessions.grader=tests.support.graders.by_length"
    judged = ("sessions.rewards=judge", "sessions.late_reward=grade", grader)
    proxy = await start(ADMIN, *judged, admit=10)
    tenant = create_key(run_dir_of(proxy.service.config).keys, "tenant", tenant="alice")[0]
    session = (await proxy.post("/rl/v1/start_session", {}, tenant)).json()
    await proxy.complete(session["api_key"])
    given = {"session_id": session["session_id"], "text": "It is Lisbon.", "score": 0.5}
    assert (await proxy.post(PATH, given)).status_code == 200
    path = f"/rl/v1/sessions/{session['session_id']}"
    for read in (path, f"{path}/content"):
        seen = await proxy.http.get(read, headers={"authorization": f"Bearer {tenant}"})
        assert seen.status_code == 200 and "Lisbon" not in seen.text, seen.text
        assert "0.5" in seen.text
        assert "Lisbon" in (await proxy.http.get(read)).text
    # In the open mode every local program is the agent, too.
    proxy = await start(admit=10)
    session = await played(proxy, rewards="judge")
    await give(proxy, session["judge_key"], text="It is Lisbon.")
    path = f"/rl/v1/sessions/{session['session_id']}"
    for read in (path, f"{path}/content"):
        assert "Lisbon" not in (await proxy.http.get(read)).text
        judges = {"authorization": f"Bearer {session['judge_key']}"}
        assert "Lisbon" in (await proxy.http.get(read, headers=judges)).text


async def test_where_both_reward_words_of_the_judge_leave_the_agents_reward(start: Start) -> None:
    proxy = await start(ADMIN, admit=10)
    session = await played(proxy, rewards="both")
    key, judge = session["api_key"], session["judge_key"]
    assert (await give(proxy, key, score=3, text="mine"))["reward"] == 3
    assert (await give(proxy, judge, text="a judge's words"))["reward"] == 3
    assert (await give(proxy, judge, score=1))["reward"] == 1
    refusal(await proxy.post(PATH, {"text": "again"}, key), 403, "judge_only", "")
