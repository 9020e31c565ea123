"""Rewards: by completion and by name, final, revised, and who gave them when."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from any_agent.errors import StoreUnavailable
from proxy_ext.journal import SetReward, Statement
from proxy_ext.journal.base import RewardRow
from proxy_ext.sessions import rewards
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.journal import make_row
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start

WEIGHTS = "sessions.reward_weights={correct: 1, format: 0.2}"


async def begun(proxy: Proxy, **fields: Any) -> tuple[str, str, str]:
    """A session with one call: its id, its key, the completion's id."""
    session = await proxy.open(**fields)
    completion = (await proxy.complete(session["api_key"]))["id"]
    return session["session_id"], session["api_key"], completion


async def give(proxy: Proxy, key: str, **body: Any) -> float:
    """What the reward adds up to."""
    response = await proxy.post("/rl/v1/set_reward", body, key)
    assert response.status_code == 200, response.text
    return float(response.json()["reward"])


async def shown(proxy: Proxy, id: str) -> dict[str, Any]:
    return dict((await proxy.http.get(f"/rl/v1/sessions/{id}")).json())


@pytest.fixture
async def weighted(start: Start) -> Proxy:
    proxy = await start(WEIGHTS)
    await proxy.admit(100)
    return proxy


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
    info = await shown(weighted, id)
    assert info["rewards"] == {completion: pytest.approx(1.4)}
    assert info["final_reward"] == -1
    history = [(r["interaction_id"], r["name"], r["value"]) for r in info["reward_history"]]
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


async def test_names_without_weights_weigh_one(proxy: Proxy) -> None:
    _, key, _ = await begun(proxy)
    assert await give(proxy, key, reward={"anything": 0.25, "else": 2}) == 2.25


async def test_unknown_names_are_refused(weighted: Proxy) -> None:
    id, key, _ = await begun(weighted)
    for body in ({"reward": {"correct": 1, "style": 1}}, {"reward": 1, "name": "style"}):
        error = refusal(
            await weighted.post("/rl/v1/set_reward", body, key), 422, "unknown_reward_name", "style"
        )
        assert "correct, format" in error["message"]
    for path, body in (
        ("set_reward", {"final_reward": {"style": 1}}),
        ("finalize", {"final_reward": {"style": 1}}),
        ("finalize", {"final_reward": {"style": 1}, "await_reward": True}),
    ):
        response = await weighted.post(f"/rl/v1/{path}", body, key)
        refusal(response, 422, "unknown_reward_name", "sessions.reward_weights")
    info = await shown(weighted, id)
    assert (info["state"], info["rewarded"], info["rewards_given"]) == ("open", False, 0)


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({}, "either reward or final_reward"),
    ({"reward": 1, "final_reward": 1}, "either reward or final_reward"),
    ({"reward": {}}, "1 to 32"),
    ({"reward": {f"n{k}": 1 for k in range(33)}}, "1 to 32"),
    ({"reward": {"a b": 1}}, "is not a valid name for a reward"),
    ({"reward": {"../x": 1}}, "is not a valid name for a reward"),
    ({"reward": {"": 1}}, "is not a valid name for a reward"),
    ({"reward": {"a": "1"}}, "must be a number"),
    ({"reward": {"a": True}}, "must be a number"),
    ({"reward": {"a": {"b": 1}}}, "must be a number"),
    ({"reward": {"a": 2e6}}, "must lie between"),
    ({"reward": [1]}, "must be a number"),
    ({"reward": {"a": 1}, "name": "b"}, "name is for a reward that is a number"),
    ({"final_reward": {"a": 1}, "name": "b"}, "name is for a reward that is a number"),
    ({"final_reward": 1, "completion_id": "x"}, "final_reward is for the whole session"),
    ({"reward": 1, "name": "a b"}, "name"),
]


@pytest.mark.parametrize(("body", "says"), BAD_BODIES)
async def test_bodies_that_are_no_reward(proxy: Proxy, body: dict[str, Any], says: str) -> None:
    id, key, _ = await begun(proxy)
    error = refusal(await proxy.post("/rl/v1/set_reward", body, key), 400, "invalid_request", says)
    assert "function" not in error["message"], "no word of how bodies are read"
    assert (await shown(proxy, id))["rewards_given"] == 0


async def test_a_deadline_needs_await_reward(proxy: Proxy) -> None:
    _, key, _ = await begun(proxy)
    response = await proxy.post("/rl/v1/finalize", {"final_reward": 1, "deadline": 5}, key)
    refusal(response, 400, "invalid_request", "deadline needs await_reward")
    for late in (-1, 0):
        body = {"await_reward": True, "deadline": late}
        refusal(await proxy.post("/rl/v1/finalize", body, key), 400, "invalid_request", "deadline")
    body = {"await_reward": True, "deadline": 3601}
    response = await proxy.post("/rl/v1/finalize", body, key)
    refusal(response, 400, "invalid_request", "sessions.reward_deadline (3600 s)")


async def test_names_of_one_reward_are_bounded(proxy: Proxy) -> None:
    _, key, _ = await begun(proxy)
    for part in range(2):
        await give(proxy, key, reward={f"n{part}-{k}": 1 for k in range(32)})
    response = await proxy.post("/rl/v1/set_reward", {"reward": 1, "name": "one-more"}, key)
    refusal(response, 422, "too_many_reward_names", "64")


async def test_revisions_of_one_session_are_bounded(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is kept, and read at the next one: an agent must not slow down its rank by them."""
    monkeypatch.setattr(rewards, "MAX_GIVEN", 3)
    key = (await proxy.open())["api_key"]
    for k in range(3):
        assert (await proxy.post("/rl/v1/set_reward", {"final_reward": k}, key)).status_code == 200
    response = await proxy.post("/rl/v1/set_reward", {"final_reward": 4}, key)
    assert (response.status_code, response.json()["error"]["code"]) == (422, "too_many_rewards")
    await proxy.complete(key)
    ended = await proxy.post("/rl/v1/finalize", {}, key)
    assert (ended.status_code, ended.json()["final_reward"]) == (200, 2.0)


async def test_the_trainer_gets_what_was_last_acknowledged(proxy: Proxy) -> None:
    id, key, completion = await begun(proxy)
    response = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key)
    assert response.json()["state"] == "finalized"
    assert await give(proxy, key, reward=0.5) == 0.5
    assert await give(proxy, key, final_reward={"judge": 2}) == 3
    assert await give(proxy, key, final_reward=-1) == 1
    (trajectory,) = await proxy.lease(owner="a")
    assert trajectory.final_reward == 1
    assert [i.reward for i in trajectory.interactions] == [0.5]
    # With the trainer nothing can be changed.
    for body in ({"reward": 9}, {"final_reward": 9}):
        response = await proxy.post("/rl/v1/set_reward", body, key)
        refusal(response, 410, "session_closed", "handed to training")
    # Nor when it is taken back: a step that has just been killed may be made again, as it was.
    await proxy.admit(1000, owner="b")
    assert (await shown(proxy, id))["state"] == "finalized"
    for body in ({"reward": 9}, {"final_reward": 9}):
        response = await proxy.post("/rl/v1/set_reward", body, key)
        refusal(response, 410, "session_closed", "a trainer has had it")
    (trajectory,) = await proxy.lease(owner="b")
    assert trajectory.final_reward == 1
    info = await shown(proxy, id)
    assert [r["value"] for r in info["reward_history"]] == [1, 0.5, 2, -1]
    assert info["rewards"] == {completion: 0.5}


async def test_an_export_that_is_given_back_fixes_nothing(proxy: Proxy) -> None:
    id, key, _ = await begun(proxy)
    await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key)
    await proxy.export(id)
    response = await proxy.post("/rl/v1/set_reward", {"final_reward": 2}, key)
    refusal(response, 410, "session_closed", "leased by an export")
    await proxy.service.leases.give_back([id], "export")
    assert await give(proxy, key, final_reward=2) == 2


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
        assert (await shown(proxy, id))["final_reward"] == trajectory.final_reward


async def test_who_gave_it(start: Start) -> None:
    proxy = await start("server.admin_key=operator-secret")
    await proxy.admit(10)
    id, key, completion = await begun(proxy)
    await give(proxy, key, reward=1)
    body = {"reward": 2, "session_id": id}
    assert (await proxy.http.post("/rl/v1/set_reward", json=body)).status_code == 200
    await proxy.post("/rl/v1/finalize", {"final_reward": 3}, key)
    info = await shown(proxy, id)
    assert [(r["by"], r["value"]) for r in info["reward_history"]] == [
        ("session", 1),
        ("admin", 2),
        ("session", 3),
    ]
    assert info["opened_by"] == "admin"
    at = [r["at"] for r in info["reward_history"]]
    assert at == sorted(at)
    # The agent itself sees it, too.
    own = {"authorization": f"Bearer {key}"}
    response = await proxy.http.get(f"/rl/v1/sessions/{id}", headers=own)
    assert response.json()["reward_history"] == info["reward_history"]
    assert completion in response.json()["rewards"]


async def test_rewards_go_on_after_a_restart(start: Start) -> None:
    proxy = await start(WEIGHTS)
    await proxy.admit(10)
    id, key, completion = await begun(proxy)
    await give(proxy, key, reward={"correct": 1, "format": 1})
    await give(proxy, key, final_reward=5)
    again = await start(WEIGHTS)
    assert await give(again, key, reward=0, name="format") == 1
    assert await give(again, key, final_reward=4, name="correct") == 9
    info = await shown(again, id)
    assert (info["rewards"], info["final_reward"]) == ({completion: 1.0}, 9)
    response = await again.post("/rl/v1/finalize", {}, key)
    assert response.json()["final_reward"] == 9, "a final reward that was set before counts"
    (trajectory,) = await again.lease()
    assert trajectory.final_reward == 9


async def test_a_long_history_shows_its_end(proxy: Proxy) -> None:
    id, key, _ = await begun(proxy)
    session = proxy.service.sessions.live[id]
    for k in range(300):
        await proxy.service.rewards.set_final_reward(session, {None: float(k)}, by="test")
    info = await shown(proxy, id)
    assert (info["rewards_given"], len(info["reward_history"])) == (300, 256)
    assert info["reward_history"][-1]["value"] == 299
    assert await give(proxy, key, final_reward=1, name="x") == 300


async def test_what_cannot_be_written_changes_nothing(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    id, key, completion = await begun(proxy)
    await give(proxy, key, reward=1)
    commit = proxy.service.journal.commit

    async def full(*statements: Statement) -> None:
        if any(isinstance(statement, SetReward) for statement in statements):
            raise StoreUnavailable("no space left", retry_after=1)
        await commit(*statements)

    with monkeypatch.context() as patched:
        patched.setattr(proxy.service.journal, "commit", full)
        for path, body in (
            ("set_reward", {"reward": 5}),
            ("set_reward", {"final_reward": 5}),
            ("finalize", {"final_reward": 5}),
            ("finalize", {"final_reward": 5, "await_reward": True}),
        ):
            response = await proxy.post(f"/rl/v1/{path}", body, key)
            assert response.status_code == 503, response.text
        info = await shown(proxy, id)
        assert (info["rewards"], info["final_reward"]) == ({completion: 1.0}, None)
        assert (info["state"], info["rewards_given"]) == ("open", 1)
    await proxy.complete(key, [*HELLO, *HELLO])
    assert (await proxy.post("/rl/v1/finalize", {"final_reward": 2}, key)).status_code == 200


async def test_without_require_reward_it_is_said(start: Start) -> None:
    proxy = await start("sessions.require_reward=false")
    await proxy.admit(10)
    said = "no reward was given: it counts as 0 (sessions.require_reward=false)"
    ids = []
    for body in (None, {"reward": 1}, {"final_reward": 1}):
        id, key, _ = await begun(proxy)
        ids.append(id)
        response: httpx.Response = await proxy.post("/rl/v1/finalize", {}, key)
        assert (response.json()["state"], response.json()["rewarded"]) == ("finalized", False)
        assert response.json()["reason"] == said
        if body is not None:
            assert (await proxy.post("/rl/v1/set_reward", body, key)).status_code == 200

    async def reasons() -> list[str | None]:
        """In memory and on disk."""
        shown = [(await proxy.http.get(f"/rl/v1/sessions/{id}")).json()["reason"] for id in ids]
        rows = [await proxy.service.journal.session(id) for id in ids]
        assert shown == [row.reason for row in rows if row is not None]
        return shown

    # Until it is rewarded after all, and also when it was trained on.
    assert await reasons() == [said, None, None]
    for _ in ids:
        await proxy.lease()
    await proxy.client.ack(owner="trainer", trained=ids, rejected=[])
    assert await reasons() == [said, None, None]


async def test_rewards_of_a_migrated_row_without_history(proxy: Proxy) -> None:
    """A journal of version 1 kept the value alone."""
    id, key, _ = await begun(proxy)
    session = proxy.service.sessions.live[id]
    session.tree.last().reward = 3.0
    assert await give(proxy, key, reward=1, name="more") == 4
