"""The routes that AReaL's users know, over ranks that were granted slots or were not."""

from __future__ import annotations

from typing import Any

import pytest

from router.affinity import home_of
from tests.router.router_lab import FakeRank, Handler, Lab, Received

START = "/rl/start_session"
NO_SLOT = {"error": {"code": "no_capacity"}}


def task_of(rank: int, ranks: int = 2) -> str:
    """A task whose home is this rank."""
    return next(f"task-{k}" for k in range(1000) if home_of(f"task-{k}", ranks) == rank)


def rank_with(rank: FakeRank, *, slots: bool, grants: bool) -> Handler:
    async def handler(received: Received) -> None:
        grant_only = received.json.get("grant_only", False)
        if grants or (slots and not grant_only):
            await received.answer({"rank": rank.number, "grant_only": grant_only})
        else:
            await received.answer(NO_SLOT, status=429, headers={"Retry-After": "2"})

    return handler


def told(lab: Lab) -> list[list[dict[str, Any]]]:
    return [[received.json for received in rank.received] for rank in lab.ranks]


async def test_slots_are_granted_to_the_ranks_in_turn(pair: Lab) -> None:
    for _ in range(6):
        assert (await pair.post("/grant_capacity")).status_code == 200
    assert [len(rank.received) for rank in pair.ranks] == [3, 3]


async def test_a_grant_with_an_idempotency_key_is_one_ranks(pair: Lab) -> None:
    for _ in range(5):
        await pair.post("/grant_capacity", None, None, **{"Idempotency-Key": "k"})
    assert sorted(len(rank.received) for rank in pair.ranks) == [0, 5]


async def test_a_task_is_opened_at_home(pair: Lab) -> None:
    for rank in pair.ranks:
        rank.handler = rank_with(rank, slots=True, grants=True)
    for home in (0, 1, 0, 1):
        response = await pair.post(START, {"task_id": task_of(home)})
        assert response.json() == {"rank": home, "grant_only": False}


async def test_without_a_slot_at_home_another_ranks_grant_will_do(pair: Lab) -> None:
    pair.ranks[0].handler = rank_with(pair.ranks[0], slots=False, grants=False)
    pair.ranks[1].handler = rank_with(pair.ranks[1], slots=True, grants=True)
    response = await pair.post(START, {"task_id": task_of(0)})
    assert response.json() == {"rank": 1, "grant_only": True}


async def test_without_a_training_another_ranks_grant_will_do(pair: Lab) -> None:
    async def finished(received: Received) -> None:
        await received.answer({"error": {"code": "run_finished", "message": ""}}, status=409)

    pair.ranks[0].handler = finished
    pair.ranks[1].handler = rank_with(pair.ranks[1], slots=False, grants=True)
    response = await pair.post(START, {"task_id": task_of(0)})
    assert response.json() == {"rank": 1, "grant_only": True}
    pair.ranks[1].handler = finished
    response = await pair.post(START, {"task_id": task_of(0)})
    assert (response.status_code, response.json()["error"]["code"]) == (409, "run_finished")


async def test_another_ranks_group_slots_will_not(pair: Lab) -> None:
    pair.ranks[0].handler = rank_with(pair.ranks[0], slots=False, grants=False)
    pair.ranks[1].handler = rank_with(pair.ranks[1], slots=True, grants=False)
    response = await pair.post(START, {"task_id": task_of(0)})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "2"


async def test_with_an_idempotency_key_only_home_is_asked(pair: Lab) -> None:
    pair.ranks[0].handler = rank_with(pair.ranks[0], slots=False, grants=False)
    body = {"task_id": task_of(0)}
    response = await pair.post(START, body, None, **{"Idempotency-Key": "k"})
    assert response.status_code == 429
    assert told(pair) == [[body], []]


async def test_a_key_is_reused_at_its_rank(pair: Lab) -> None:
    for rank in pair.ranks:
        rank.handler = rank_with(rank, slots=True, grants=False)
    task, key = task_of(0), pair.key(0)
    response = await pair.post(START, {"task_id": task, "api_key": key})
    assert response.json() == {"rank": 0, "grant_only": False}
    other = await pair.post(START, {"task_id": task, "api_key": pair.key(1)})
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "lane_on_other_rank"
    pair.ranks[1].handler = rank_with(pair.ranks[1], slots=True, grants=True)
    granted = await pair.post(START, {"task_id": task, "api_key": pair.key(1)})
    assert granted.json() == {"rank": 1, "grant_only": True}


async def test_a_dead_ranks_grants_are_passed_over(pair: Lab) -> None:
    pair.ranks[0].handler = rank_with(pair.ranks[0], slots=False, grants=False)

    async def die(received: Received) -> None:
        received.die()

    pair.ranks[1].handler = die
    response = await pair.post(START, {"task_id": task_of(0)})
    assert response.status_code == 429


async def test_a_session_beside_an_open_does_not_choose_its_rank(pair: Lab) -> None:
    for rank in pair.ranks:
        rank.handler = rank_with(rank, slots=True, grants=False)
    beside = {"X-Any-Agent-Session": "ses-1-0123456789abcdef"}
    response = await pair.post(START, {"task_id": task_of(0)}, **beside)
    assert response.json()["rank"] == 0


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"task_id": 5}'])
async def test_what_is_wrong_some_rank_says(pair: Lab, body: bytes) -> None:
    assert (await pair.post(START, body)).status_code == 200
    assert sum(len(rank.received) for rank in pair.ranks) == 1


@pytest.mark.parametrize("session", ["task-0-1-0", "ses-1-0123456789abcdef"])
async def test_an_export_goes_to_the_sessions_rank(pair: Lab, session: str) -> None:
    for _ in range(3):
        await pair.post("/export_trajectories", {"session_id": session})
    assert [len(rank.received) for rank in pair.ranks] == [0, 3]


async def test_an_id_before_the_path_names_the_rank(pair: Lab) -> None:
    for path in ("v1/chat/completions", "chat/completions", "rl/set_reward", "rl/end_session"):
        await pair.post(f"/task-0-1-7/{path}", {"reward": 1})
    assert [len(rank.received) for rank in pair.ranks] == [0, 4]
    assert all(r.target.startswith("/task-0-1-7/") for r in pair.ranks[1].received)


async def test_keys_name_the_rank_of_rewards_and_ends(pair: Lab) -> None:
    for path in ("/rl/set_reward", "/rl/end_session"):
        await pair.post(path, {}, pair.key(1))
    assert [len(rank.received) for rank in pair.ranks] == [0, 2]


async def test_health_counts_the_ranks(pair: Lab) -> None:
    assert (await pair.get("/health")).json() == {"status": "ok", "workers": 2}
