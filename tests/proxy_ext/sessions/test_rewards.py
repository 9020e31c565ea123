"""Rewards: by completion and by name, final, revised, and who gave them when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy_ext.journal import SetReward
from proxy_ext.journal.base import RewardRow
from proxy_ext.sessions import rewards
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.journal import make_row
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start
from tests.support.sessions import info, played, unwritable

WEIGHTS = "sessions.reward_weights={correct: 1, format: 0.2}"


async def begun(proxy: Proxy, **fields: Any) -> tuple[str, str, str]:
    """A session with one call: its id, its key, the completion's id."""
    session = await played(proxy, **fields)
    return session["session_id"], session["api_key"], session["completion"]


async def give(proxy: Proxy, key: str, **body: Any) -> float:
    """What the reward adds up to."""
    response = await proxy.post("/rl/v1/set_reward", body, key)
    assert response.status_code == 200, response.text
    return float(response.json()["reward"])


@pytest.fixture
async def weighted(start: Start) -> Proxy:
    return await start(WEIGHTS, admit=100)


def test_named_parts_are_summed_over_a_session() -> None:
    def given(*parts: tuple[str | None, str | None, float, str]) -> list[RewardRow]:
        return [RewardRow(about, name, value, by, 0.0) for about, name, value, by in parts]

    history = given(
        ("a", "format", 1.0, "session"),
        ("a", "format", 0.5, "session"),  # the last one counts
        ("b", "format", 2.0, "session"),
        ("b", None, 9.0, "session"),
        (None, "correct", 1.0, "session"),
    )
    assert rewards.named_rewards(make_row("s"), history) == {"format": 2.5, "correct": 1.0}
    both = make_row("s", rewarded_by="both")
    judged = [*history, *given(("b", "style", 4.0, "judge"))]
    # A judge's parts of a reward replace the agent's of that one.
    assert rewards.named_rewards(both, judged) == {"format": 0.5, "correct": 1.0, "style": 4.0}
    many = given(*((str(k), f"n{k}", 1.0, "session") for k in range(1000)))
    assert len(rewards.named_rewards(make_row("s"), many)) == 64


async def test_rewards_by_name_are_weighed_and_added(weighted: Proxy) -> None:
    id, key, completion = await begun(weighted)
    assert await give(weighted, key, reward={"correct": 1, "format": 0.5}) == 1.1
    assert await give(weighted, key, reward=10) == pytest.approx(11.1)
    # The same name again replaces its value, the others stay.
    assert await give(weighted, key, reward=2, name="format") == pytest.approx(11.4)
    assert await give(weighted, key, reward=0) == pytest.approx(1.4)
    assert await give(weighted, key, final_reward={"correct": -1}) == -1
    now = await info(weighted, id)
    assert now["rewards"] == {completion: pytest.approx(1.4)}
    assert now["final_reward"] == -1
    history = [(r["interaction_id"], r["name"], r["value"]) for r in now["reward_history"]]
    assert history == [
        (completion, "correct", 1),
        (completion, "format", 0.5),
        (completion, None, 10),
        (completion, "format", 2),
        (completion, None, 0),
        (None, "correct", -1),
    ]
    (stored,) = await weighted.recorded(id)
    assert stored.reward == pytest.approx(1.4)


async def test_names_without_weights_weigh_one_and_are_bounded(proxy: Proxy) -> None:
    _, key, _ = await begun(proxy)
    assert await give(proxy, key, reward={"anything": 0.25, "else": 2}) == 2.25
    for part in range(2):
        await give(proxy, key, reward={f"n{part}-{k}": 1 for k in range(31)})
    response = await proxy.post("/rl/v1/set_reward", {"reward": 1, "name": "one-more"}, key)
    refusal(response, 422, "too_many_reward_names")


async def test_unknown_names_are_refused(weighted: Proxy) -> None:
    id, key, _ = await begun(weighted)
    for path, body in (
        ("set_reward", {"reward": {"correct": 1, "style": 1}}),
        ("set_reward", {"reward": 1, "name": "style"}),
        ("set_reward", {"final_reward": {"style": 1}}),
        ("finalize", {"final_reward": {"style": 1}}),
        ("finalize", {"final_reward": {"style": 1}, "await_reward": True}),
    ):
        response = await weighted.post(f"/rl/v1/{path}", body, key)
        refusal(response, 422, "unknown_reward_name", "style")
    now = await info(weighted, id)
    assert (now["state"], now["rewarded"], now["rewards_given"]) == ("open", False, 0)


BAD_BODIES: dict[str, list[dict[str, Any]]] = {
    "set_reward": [
        {},
        {"reward": 1, "final_reward": 1},
        *({"reward": many} for many in ({}, {f"n{k}": 1 for k in range(33)})),
        *({"reward": {name: 1}} for name in ("a b", "../x", "")),
        *({"reward": {"a": value}} for value in ("1", True, {"b": 1}, 2e6)),
        {"reward": [1]},
        {"reward": {"a": 1}, "name": "b"},
        {"final_reward": {"a": 1}, "name": "b"},
        {"final_reward": 1, "completion_id": "x"},
        {"reward": 1, "name": "a b"},
    ],
    "finalize": [
        # A deadline needs `await_reward`, and ends by `sessions.reward_deadline`.
        {"final_reward": 1, "deadline": 5},
        *({"await_reward": True, "deadline": late} for late in (-1, 0, 3601)),
    ],
}


async def test_bodies_that_are_no_reward_are_refused(proxy: Proxy) -> None:
    id, key, _ = await begun(proxy)
    for path, bodies in BAD_BODIES.items():
        for body in bodies:
            response = await proxy.post(f"/rl/v1/{path}", body, key)
            error = refusal(response, 400, "invalid_request")
            assert "function" not in error["message"], "no word of how bodies are read"
    now = await info(proxy, id)
    assert (now["state"], now["rewards_given"]) == ("open", 0)


async def test_the_trainer_gets_what_was_last_acknowledged(proxy: Proxy) -> None:
    id, key, completion = await begun(proxy)
    response = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key)
    assert response.json()["state"] == "finalized"
    assert await give(proxy, key, reward=0.5) == 0.5
    assert await give(proxy, key, final_reward={"judge": 2}) == 3
    assert await give(proxy, key, final_reward=-1) == 1
    (trajectory,) = await proxy.lease()
    assert trajectory.final_reward == 1
    assert [i.reward for i in trajectory.interactions] == [0.5]
    # With the trainer nothing can be changed, nor when it is taken back: a step that has just been
    # killed may be made again, as it was.
    for owner, state in (("trainer", "leased"), ("b", "finalized")):
        await proxy.admit(1000, owner=owner, held=[id])
        assert (await info(proxy, id))["state"] == state
        for body in ({"reward": 9}, {"final_reward": 9}):
            response = await proxy.post("/rl/v1/set_reward", body, key)
            refusal(response, 410, "session_closed")
    (trajectory,) = await proxy.lease(owner="b")
    assert trajectory.final_reward == 1
    now = await info(proxy, id)
    assert [r["value"] for r in now["reward_history"]] == [1, 0.5, 2, -1]
    assert now["rewards"] == {completion: 0.5}


async def test_a_revision_and_a_lease_do_not_cross(proxy: Proxy) -> None:
    """Whatever is acknowledged before the lease is in it; whatever comes after it is refused."""
    for _ in range(10):
        id, key, _ = await begun(proxy)
        await proxy.post("/rl/v1/finalize", {"final_reward": 0}, key)

        async def revise(value: int, key: str = key) -> tuple[int, int]:
            body = {"final_reward": value}
            return value, (await proxy.post("/rl/v1/set_reward", body, key)).status_code

        leased, *revised = await asyncio.gather(proxy.lease(wait=5), *map(revise, range(1, 6)))
        (trajectory,) = leased
        assert {status for _, status in revised} <= {200, 410}
        kept = [0, *(value for value, status in revised if status == 200)]
        assert trajectory.final_reward in kept
        assert (await info(proxy, id))["final_reward"] == trajectory.final_reward


async def test_a_reward_says_who_gave_it(start: Start) -> None:
    proxy = await start("server.admin_key=operator-secret", admit=10)
    id, key, completion = await begun(proxy)
    await give(proxy, key, reward=1)
    body = {"reward": 2, "session_id": id}
    assert (await proxy.http.post("/rl/v1/set_reward", json=body)).status_code == 200
    await proxy.post("/rl/v1/finalize", {"final_reward": 3}, key)
    now = await info(proxy, id)
    assert [(r["by"], r["value"]) for r in now["reward_history"]] == [
        ("session", 1),
        ("admin", 2),
        ("session", 3),
    ]
    assert now["opened_by"] == "admin"
    # The agent itself sees it, too.
    own = {"authorization": f"Bearer {key}"}
    response = await proxy.http.get(f"/rl/v1/sessions/{id}", headers=own)
    assert response.json()["reward_history"] == now["reward_history"]
    assert completion in response.json()["rewards"]


async def test_a_long_history_shows_its_end(proxy: Proxy) -> None:
    id, key, _ = await begun(proxy)
    session = proxy.service.sessions.live[id]
    for k in range(300):
        await proxy.service.rewards.set_final_reward(session, {None: float(k)}, by="test")
    now = await info(proxy, id)
    assert (now["rewards_given"], len(now["reward_history"])) == (300, 256)
    assert now["reward_history"][-1]["value"] == 299
    assert await give(proxy, key, final_reward=1, name="x") == 300


async def test_a_reward_that_cannot_be_written_changes_nothing(proxy: Proxy) -> None:
    id, key, completion = await begun(proxy)
    await give(proxy, key, reward=1)
    with unwritable(proxy.service.journal, SetReward):
        for path, body in (
            ("set_reward", {"reward": 5}),
            ("set_reward", {"final_reward": 5}),
            ("finalize", {"final_reward": 5}),
            ("finalize", {"final_reward": 5, "await_reward": True}),
        ):
            response = await proxy.post(f"/rl/v1/{path}", body, key)
            assert response.status_code == 503, response.text
        now = await info(proxy, id)
        assert (now["rewards"], now["final_reward"]) == ({completion: 1.0}, None)
        assert (now["state"], now["rewards_given"]) == ("open", 1)
    await proxy.complete(key, [*HELLO, *HELLO])
    assert (await proxy.post("/rl/v1/finalize", {"final_reward": 2}, key)).status_code == 200


async def test_a_missing_reward_is_said_to_count_as_0(start: Start) -> None:
    proxy = await start("sessions.require_reward=false", admit=10)
    said = "no reward was given: it counts as 0 (sessions.require_reward=false)"
    ids = []
    for body in ({}, {"reward": 1}, {"final_reward": 1}):
        id, key, _ = await begun(proxy)
        ids.append(id)
        ended = (await proxy.post("/rl/v1/finalize", {}, key)).json()
        assert (ended["state"], ended["rewarded"], ended["reason"]) == ("finalized", False, said)
        if body:
            assert (await proxy.post("/rl/v1/set_reward", body, key)).status_code == 200
    # Until it is rewarded after all, and also when it was trained on; in memory and on disk.
    for _ in range(2):
        assert [(await info(proxy, id))["reason"] for id in ids] == [said, None, None]
        rows = [await proxy.service.journal.session(id) for id in ids]
        assert [row.reason for row in rows if row is not None] == [said, None, None]
        while await proxy.lease():
            pass
        await proxy.client.ack(owner="trainer", trained=ids, rejected=[])


async def test_rewards_add_to_one_that_has_no_history(proxy: Proxy) -> None:
    """Only the value is left where the history is archived."""
    id, key, _ = await begun(proxy)
    session = proxy.service.sessions.live[id]
    session.tree.last().reward = 3.0
    assert await give(proxy, key, reward=1, name="more") == 4
