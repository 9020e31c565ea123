"""Sessions whose rewards are a judge's: the session's own key can neither set nor evade them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from any_agent.auth.key_store import create_key
from any_agent.keys import KeySigner, lane_in
from any_agent.launcher.trial import trial_dir
from proxy_ext.sessions import rewards
from tests.proxy_ext.api.test_refusals import refusal
from tests.proxy_ext.test_auth import asked
from tests.support import sessions
from tests.support.proxy import Proxy
from tests.support.proxy_fixtures import Start
from tests.support.sessions import finalize, info, over

ADMIN = "server.admin_key=operator-secret"
GRADER = "tests.support.graders.by_length"


@pytest.fixture
async def closed(start: Start) -> Proxy:
    return await start(ADMIN, admit=1000)


async def played(proxy: Proxy, rewards: str | None = "judge", **fields: Any) -> dict[str, Any]:
    """A session with one call."""
    named = {} if rewards is None else {"rewards": rewards}
    return await sessions.played(proxy, **named, **fields)


async def graded_by_other(proxy: Proxy, session: dict[str, Any]) -> dict[str, Any]:
    """The session once it is graded, which has not the reward that its agent wants."""
    now = await over(proxy, session)
    assert now["state"] == "finalized" and now["final_reward"] != 1000
    return now


def tenants_key(proxy: Proxy) -> str:
    """Create the key of a tenant, which an agent may have."""
    return create_key(trial_dir(proxy.service.config).keys, "tenant", tenant="alice")[0]


SET, END = "/rl/v1/set_reward", "/rl/v1/finalize"
ATTEMPTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "reward": ("POST", SET, {"reward": 1000}),
    "reward by name": ("POST", SET, {"reward": 1000, "name": "x"}),
    "rewards by name": ("POST", SET, {"reward": {"x": 1000, "y": 1}}),
    "reward of one call": ("POST", SET, {"reward": 1000, "completion_id": "ID"}),
    "reward of an interaction": ("POST", SET, {"reward": 1000, "interaction_id": "ID"}),
    "final reward": ("POST", SET, {"final_reward": 1000}),
    "final rewards": ("POST", SET, {"final_reward": {"x": 1000}}),
    "reward in the query": ("POST", f"{SET}?reward=1000", {}),
    "final reward in the query": ("POST", f"{SET}?final_reward=1000", {}),
    "finalize": ("POST", END, {"final_reward": 1000}),
    "finalize in the query": ("POST", f"{END}?final_reward=1000", {}),
    "await": ("POST", END, {"final_reward": 1000, "await_reward": True}),
    "short wait": ("POST", END, {"await_reward": True, "deadline": 0.001}),
    "AReaL's reward": ("POST", "/rl/set_reward", {"reward": 1000}),
    "AReaL's reward of one call": ("POST", "/rl/set_reward", {"reward": 1, "interaction_id": "ID"}),
    "abort": ("POST", "/rl/v1/sessions/SESSION/abort", {}),
    "veto": ("POST", "/rl/v1/sessions/SESSION/veto", {}),
    "delete": ("DELETE", "/rl/v1/sessions/SESSION", {}),
    "its metadata": ("GET", "/rl/v1/sessions/SESSION/content", {}),
}


def filled(value: Any, session: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: filled(one, session) for name, one in value.items()}
    if isinstance(value, str):
        return value.replace("SESSION", session["session_id"]).replace("ID", session["completion"])
    return value


@pytest.mark.parametrize("how", ["bearer", "prefix", "x-api-key"])
@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.service
async def test_an_agent_cannot_do_what_is_the_judges(closed: Proxy, attempt: str, how: str) -> None:
    session = await played(closed, metadata={"answer": "forty-two"})
    before = await info(closed, session)
    method, path, body = (filled(part, session) for part in ATTEMPTS[attempt])
    key = session["api_key"]
    path = f"/{key}{path}" if how == "prefix" else path
    headers = {"x-api-key": key} if how == "x-api-key" else {}
    response = await asked(
        closed, method, path, key if how == "bearer" else "", body or None, **headers
    )
    refusal(response, 403, "judge_only")
    assert "forty-two" not in response.text
    after = await info(closed, session)
    times = {"expires_in": 0, "idle_in": 0}
    assert {**after, **times} == {**before, **times}
    judged = await closed.post(END, {"final_reward": 0.25}, session["judge_key"])
    assert (judged.json()["state"], judged.json()["final_reward"]) == ("finalized", 0.25)
    (trajectory,) = await closed.lease()
    assert trajectory.final_reward == 0.25
    assert [i.reward for i in trajectory.interactions] == [None]


@pytest.mark.parametrize("path", [END, "/rl/end_session"])
@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_the_agents_end_awaits_the_judge(closed: Proxy, path: str, mode: str) -> None:
    session = await closed.open(rewards="judge", mode=mode)
    key = session["api_key"]
    if mode == "train":
        refusal(await closed.post(path, {}, key), 422, "no_interactions")
        assert (await info(closed, session))["state"] == "open"
    await closed.complete(key)
    for _ in range(2):
        assert (await closed.post(path, {}, key)).status_code == 200
    now = await info(closed, session)
    assert (now["state"], now["rewarded_by"]) == ("awaiting_reward", "judge")
    # The judge has at least the session's whole time.
    assert now["awaits_in"] > session["expires_in"] - 60
    refusal(await closed.call(key), 410, "session_closed")
    refusal(await closed.post(SET, {"reward": 1}, key), 403, "judge_only")
    ended = await closed.post(END, {"final_reward": -1}, session["judge_key"])
    state = "finalized" if mode == "train" else "evaluated"
    assert (ended.json()["state"], ended.json()["final_reward"]) == (state, -1.0)
    assert (await closed.post(END, {}, key)).json()["state"] == state


async def test_a_judges_key_is_good_for_its_session_alone(closed: Proxy) -> None:
    session, other = await played(closed), await played(closed)
    key = session["judge_key"]
    assert lane_in(key) == lane_in(session["api_key"])
    named = {"session_id": other["session_id"], "final_reward": 1}
    refusal(await closed.post(SET, named, key), 400, "session_mismatch")
    forged = key[:-1] + ("0" if key[-1] != "0" else "1")
    for wrong in (forged, session["api_key"].replace("sk-v1.", "sk-judge.")):
        response = await closed.post(SET, {"final_reward": 1}, wrong)
        refusal(response, 401, "invalid_api_key")
    as_agents = key.replace("sk-judge.", "sk-v1.")
    refusal(await closed.post(SET, {"reward": 1}, as_agents), 401, "invalid_api_key")
    reward = {"reward": 0.5, "completion_id": session["completion"]}
    assert (await closed.post(SET, reward, key)).json()["reward"] == 0.5
    (entry,) = (await info(closed, session))["reward_history"]
    assert entry["by"] == "judge"


async def test_tenants_and_operators_are_judges(closed: Proxy) -> None:
    alice = tenants_key(closed)
    body = {"rewards": "judge"}
    session = (await asked(closed, "POST", "/rl/v1/start_session", alice, body)).json()
    await closed.complete(session["api_key"])
    reward = {"session_id": session["session_id"], "final_reward": 0.5}
    assert (await asked(closed, "POST", SET, alice, reward)).status_code == 200
    assert (await closed.http.post(END, json=reward)).status_code == 200


async def test_in_the_open_mode_no_key_is_no_judges(proxy: Proxy) -> None:
    """Every local program is an operator there, the agent included."""
    session = await played(proxy)
    body = {"session_id": session["session_id"], "final_reward": 1000}
    for path in (SET, END):
        refusal(await asked(proxy, "POST", path, "", body), 403, "judge_only")
    by_id = f"/{session['session_id']}/rl/v1/set_reward"
    refusal(await asked(proxy, "POST", by_id, "", {"final_reward": 1000}), 403, "judge_only")
    end = {"session_id": session["session_id"]}
    ended = await asked(proxy, "POST", END, "", end)
    assert ended.json()["state"] == "awaiting_reward"
    judged = await asked(proxy, "POST", END, session["judge_key"], {"final_reward": 0})
    assert judged.json()["state"] == "finalized"


async def test_with_both_allowed_the_judges_reward_replaces_the_agents(closed: Proxy) -> None:
    session = await played(closed, "both")
    key, judge = session["api_key"], session["judge_key"]
    for body in ({"reward": 0.5}, {"final_reward": {"mine": 1000}}, {"final_reward": 7}):
        assert (await closed.post(SET, body, key)).status_code == 200
    assert (await info(closed, session))["final_reward"] == 1007
    for name, value in (("correct", 1), ("format", 0.25)):
        body = {"final_reward": value, "name": name}
        judged = await closed.post(SET, body, judge)
    assert judged.json()["reward"] == 1.25
    for body in ({"final_reward": 1000}, {"final_reward": {"mine": 1000}}):
        refusal(await closed.post(SET, body, key), 403, "judge_only")
    # Of what the judge has not rewarded, the agent's word stands.
    assert (await closed.post(SET, {"reward": 0.75}, key)).status_code == 200
    ended = await closed.post(END, {}, key)
    assert ended.json()["state"] == "awaiting_reward"
    same = {"final_reward": {"correct": 1.0, "format": 0.25}}
    assert (await closed.post(END, same, judge)).json()["state"] == "finalized"
    assert (await closed.post(END, same, judge)).status_code == 200
    (trajectory,) = await closed.lease()
    assert trajectory.final_reward == 1.25
    assert [i.reward for i in trajectory.interactions] == [0.75]
    # The agent's `mine` is gone with the rest of its final reward.
    assert trajectory.named_rewards == {"correct": 1.0, "format": 0.25}


async def test_revisions_are_bounded_and_an_agent_cannot_use_up_its_judges(
    closed: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is kept, and read at the next one: an agent must not slow down its rank by them."""
    monkeypatch.setattr(rewards, "MAX_GIVEN", 3)
    session = await played(closed, "both")
    key, judge = session["api_key"], session["judge_key"]
    for _ in range(3):
        assert (await closed.post(SET, {"final_reward": 9}, key)).status_code == 200
    refusal(await closed.post(SET, {"final_reward": 9}, key), 422, "too_many_rewards")
    for _ in range(3):
        judged = await closed.post(SET, {"final_reward": 1}, judge)
        assert (judged.status_code, judged.json()["reward"]) == (200, 1.0)
    refusal(await closed.post(SET, {"final_reward": 1}, judge), 422, "too_many_rewards")
    assert (await closed.post(END, {}, judge)).json()["final_reward"] == 1.0


async def test_with_both_allowed_the_agents_reward_stands_without_a_judge(closed: Proxy) -> None:
    session = await played(closed, "both")
    ended = await finalize(closed, session, final_reward=3)
    assert (ended["state"], ended["final_reward"]) == ("awaiting_reward", 3.0)
    assert await closed.lease() == []
    path = f"/rl/v1/sessions/{session['session_id']}/abort"
    refusal(await closed.post(path, {}, session["api_key"]), 403, "judge_only")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("sessions.rewards=judge", "judge"),
        ("sessions.rewards=both", "both"),
        ("sessions.max_open=100", "agent"),
        ("sessions.late_reward=grade", "judge"),
        # It judges the sessions that model calls open, not those that agents open.
        ("sessions.implicit=true", "agent"),
    ],
)
async def test_the_default_of_the_run_decides_who_rewards(
    start: Start, setting: str, expected: Literal["agent", "judge", "both"]
) -> None:
    proxy = await start(ADMIN, setting, f"sessions.grader={GRADER}", admit=10)
    session = await played(proxy, None)
    assert (session["judge_key"] is not None) == (expected != "agent")
    assert (await info(proxy, session))["rewarded_by"] == expected
    named = await played(proxy, "agent")
    assert (named["judge_key"], (await info(proxy, named))["rewarded_by"]) == (None, "agent")
    response = await proxy.post(SET, {"reward": 1}, named["api_key"])
    assert response.status_code == 200


async def test_the_configured_grader_gives_the_reward_as_the_judge(start: Start) -> None:
    """Its agent may say when; a reward of its own it has none."""
    proxy = await start(ADMIN, "sessions.late_reward=grade", f"sessions.grader={GRADER}", admit=10)
    session, judged = await played(proxy, None), await played(proxy, "judge")
    refusal(await proxy.post(SET, {"reward": 1000}, session["api_key"]), 403, "judge_only")
    soon = {"await_reward": True, "deadline": 0.01}
    assert (await proxy.post(END, soon, session["api_key"])).status_code == 200
    now = await graded_by_other(proxy, session)
    assert [entry["by"] for entry in now["reward_history"]] == [f"grader {GRADER}"]
    # Where the opener is the judge, its agent cannot have the grader.
    refusal(await proxy.post(END, soon, judged["api_key"]), 403, "judge_only")
    assert (await finalize(proxy, judged))["awaits_in"] > 3000
    ended = (await proxy.post(END, {"final_reward": 0.25}, judged["judge_key"])).json()
    assert (ended["state"], ended["final_reward"]) == ("finalized", 0.25)


@pytest.mark.parametrize(
    ("setting", "looser", "allowed"),
    [
        ("judge", ["agent", "both"], ["judge"]),
        ("both", ["agent"], ["both", "judge"]),
        ("agent", [], ["agent", "both", "judge"]),
        ("null", [], ["agent", "both", "judge"]),
    ],
)
async def test_the_operators_choice_binds_tenants(
    start: Start, setting: str, looser: list[str], allowed: list[str]
) -> None:
    proxy = await start(ADMIN, f"sessions.rewards={setting}", admit=20)
    key = tenants_key(proxy)
    for named in looser:
        for path in ("/rl/v1/start_session", "/rl/start_session"):
            response = await asked(proxy, "POST", path, key, {"rewards": named})
            refusal(response, 403, "judge_only")
        assert (await proxy.open(rewards=named))["session_id"], "the operator may"
    for named in allowed:
        response = await asked(proxy, "POST", "/rl/v1/start_session", key, {"rewards": named})
        assert response.status_code == 200, response.text
    session = (await asked(proxy, "POST", "/rl/v1/start_session", key, {})).json()
    expected = "agent" if setting == "null" else setting
    assert (await info(proxy, session))["rewarded_by"] == expected


@pytest.mark.parametrize("own", ["sessions.late_reward=grade", "sessions.implicit=true"])
async def test_where_the_operators_grader_is_the_judge_no_tenant_is(start: Start, own: str) -> None:
    """An agent that has its tenant's key opens a session of its own, and pays itself."""
    proxy = await start(ADMIN, "sessions.rewards=judge", own, f"sessions.grader={GRADER}", admit=20)
    key = tenants_key(proxy)
    for named in ("agent", "both", "judge"):
        response = await asked(proxy, "POST", "/rl/v1/start_session", key, {"rewards": named})
        refusal(response, 403, "judge_only")
    session = (await asked(proxy, "POST", "/rl/v1/start_session", key, {})).json()
    assert session["judge_key"] is None
    assert (await info(proxy, session))["rewarded_by"] == "judge"
    await proxy.complete(session["api_key"])
    paid = {"session_id": session["session_id"], "final_reward": 1000}
    for path in (SET, END):
        refusal(await asked(proxy, "POST", path, key, paid), 403, "judge_only")
    lane = lane_in(session["api_key"])
    assert lane is not None
    # As of an earlier session under the same key.
    judge = KeySigner(trial_dir(proxy.service.config).signing_secret()).key_of(lane, "sk-judge.")
    response = await asked(proxy, "POST", SET, judge, {"final_reward": 1000})
    refusal(response, 403, "judge_only")
    body = {"session_id": session["session_id"], "await_reward": True, "deadline": 0.01}
    assert (await asked(proxy, "POST", END, key, body)).status_code == 200
    await graded_by_other(proxy, session)
    second = await played(proxy, None)
    assert second["judge_key"] is not None, "the operator may judge"


async def test_the_keys_next_session_keeps_its_judge(closed: Proxy) -> None:
    session = await played(closed)
    await closed.post(END, {"final_reward": 1}, session["judge_key"])
    again = await played(closed, None, api_key=session["api_key"])
    row = await closed.service.journal.session(again["session_id"])
    assert row is not None and row.rewarded_by == "judge"
    assert again["judge_key"] == session["judge_key"]
    refusal(await closed.post(SET, {"reward": 1}, again["api_key"]), 403, "judge_only")


async def test_the_judges_reward_wins_over_simultaneous_ones_of_the_agent(closed: Proxy) -> None:
    session = await played(closed, "both")
    bodies = [(session["api_key"], 1000), (session["judge_key"], 0.5)] * 5
    answers = await asyncio.gather(
        *(closed.post(SET, {"final_reward": r}, key) for key, r in bodies)
    )
    assert {answer.status_code for answer in answers} <= {200, 403}
    assert (await info(closed, session))["final_reward"] == 0.5
