"""The routes that AReaL's users know, over ranks that were granted slots or were not."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest

from any_agent.protocol.rl import GRANT_ONLY_HEADER
from router.affinity import home_of
from router.areal import GRANT
from tests.router.conftest import StartLab
from tests.support.router import FakeRank, Lab, Received, die, refusal, refuses

START = "/rl/start_session"
NO_SLOT = {"error": {"code": "no_capacity"}}


def task_of(rank: int, ranks: int = 2) -> str:
    """A task whose home is this rank."""
    return next(f"task-{k}" for k in range(1000) if home_of(f"task-{k}", range(ranks)) == rank)


@dataclass
class Slots:
    """What a rank has: it answers opens, and gives or takes granted slots."""

    rank: FakeRank
    grants: int = 0
    trainers: int = 0

    def __post_init__(self) -> None:
        self.rank.handler = self.answer

    async def answer(self, received: Received) -> None:
        only = bool(received.values(GRANT_ONLY_HEADER))
        if received.target == GRANT:
            change = received.json.get("change")
            if change is not None:
                assert received.json["of"] == "others"
                assert received.values("authorization")[0].startswith("Bearer sk-trainer.run.")
            if self.grants + (change or 1) < 0:
                await received.answer({"error": {"code": "no_grant"}}, status=409)
                return
            self.grants += change or 1
            await received.answer({"capacity": self.grants})
        elif self.grants:
            self.grants -= 1
            await received.answer({"rank": self.rank.number, "granted": True})
        elif self.trainers and not only:
            self.trainers -= 1
            await received.answer({"rank": self.rank.number, "granted": False})
        else:
            await received.answer(NO_SLOT, status=429, headers={"Retry-After": "2"})


async def opened(lab: Lab, body: Any = None, key: str | None = None, **headers: str) -> Any:
    response = await lab.post(START, body or {}, key, **headers)
    return response.json() if response.status_code == 200 else response.status_code


def on(rank: int, *, granted: bool) -> dict[str, Any]:
    return {"rank": rank, "granted": granted}


async def test_slots_are_granted_to_the_ranks_in_turn(pair: Lab) -> None:
    for _ in range(6):
        assert (await pair.post("/grant_capacity")).status_code == 200
    assert [len(rank.received) for rank in pair.ranks] == [3, 3]
    for _ in range(5):
        await pair.post("/grant_capacity", None, None, **{"Idempotency-Key": "k"})
    assert sorted(len(rank.received) for rank in pair.ranks) == [3, 8], "a key has one rank"


async def test_a_task_is_opened_at_home(pair: Lab) -> None:
    ranks = [Slots(rank, grants=1, trainers=1) for rank in pair.ranks]
    for granted in (True, False):
        for home in (0, 1):
            assert await opened(pair, {"task_id": task_of(home)}) == on(home, granted=granted)
    assert [(r.grants, r.trainers) for r in ranks] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("how", ["body", "query"])
async def test_a_granted_slot_is_taken_before_any_of_the_trainers(pair: Lab, how: str) -> None:
    Slots(pair.ranks[0], trainers=5)
    Slots(pair.ranks[1], trainers=5, grants=2)
    for task in (task_of(0), None):
        body = {"task_id": task} if task and how == "body" else {}
        query = f"?task_id={task}" if task and how == "query" else ""
        response = await pair.post(f"{START}{query}", body)
        assert response.json() == on(1, granted=True)
    response = await pair.post(f"{START}?task_id={task_of(0)}")
    assert response.json() == on(0, granted=False)


@pytest.mark.parametrize(("headers", "rank"), [({}, 1), ({"Idempotency-Key": "k"}, 0)])
async def test_a_slot_granted_behind_an_opens_back_is_found(
    start_lab: StartLab, headers: dict[str, str], rank: int
) -> None:
    """Rank 1 has none when it is asked, and one by the time that rank 2 has said so, too."""
    found = await _opened_while_granted(await start_lab(ranks=3), headers)
    assert found == on(rank, granted=True)


@pytest.mark.parametrize("left", [True, False])
async def test_the_answer_of_the_last_try_is_the_answer_of_the_open(
    start_lab: StartLab, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is the open's; without one, the open gets a slot of the trainer."""
    monkeypatch.setattr("router.areal.MAX_TRIES", 1)
    found = await _opened_while_granted(await start_lab(ranks=3), {}, left=left)
    assert found == (on(1, granted=True) if left else on(0, granted=False))


async def _opened_while_granted(lab: Lab, headers: dict[str, str], *, left: bool = True) -> Any:
    """Open while rank 1 is granted a slot, which is then ``left``, or gone at once."""
    asked, go_on = asyncio.Event(), asyncio.Event()
    slots = [Slots(each, trainers=5) for each in lab.ranks[:2]]
    empty, times = Slots(lab.ranks[2]), itertools.count(1)

    async def slow(received: Received) -> None:
        if next(times) == 1:
            asked.set()
            await go_on.wait()
        await empty.answer(received)

    lab.ranks[2].handler = slow
    opening = asyncio.create_task(opened(lab, {"task_id": task_of(0, 3)}, **headers))
    await asked.wait()
    granted = await lab.post("/grant_capacity", {"task_id": task_of(1, 3)})
    assert granted.json() == {"capacity": 1}
    slots[1].grants = int(left)
    go_on.set()
    return await opening


async def test_a_rank_that_hangs_is_not_asked_again_for_a_while(
    start_lab: StartLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.areal.ASK_TIMEOUT", 0.2)
    lab = await start_lab(ranks=2)
    Slots(lab.ranks[0], trainers=5)
    asked, released = 0, asyncio.Event()

    async def hangs(received: Received) -> None:
        nonlocal asked
        asked += 1
        await released.wait()

    lab.ranks[1].handler = hangs
    for _ in range(3):
        assert await opened(lab, {"task_id": task_of(0, 2)}) == on(0, granted=False)
    released.set()
    assert asked == 1


async def test_another_ranks_slot_will_do_unless_it_is_of_a_group(pair: Lab) -> None:
    Slots(pair.ranks[0])
    Slots(pair.ranks[1], trainers=4)
    response = await pair.post(START, {"task_id": task_of(0)})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert [await opened(pair) for _ in range(5)] == [on(1, granted=False)] * 4 + [429]


async def test_without_a_training_another_ranks_grant_will_do(pair: Lab) -> None:
    pair.ranks[0].handler = refuses("run_finished", 409)
    Slots(pair.ranks[1], grants=1)
    assert await opened(pair, {"task_id": task_of(0)}) == on(1, granted=True)
    pair.ranks[1].handler = refuses("run_finished", 409)
    response = await pair.post(START, {"task_id": task_of(0)})
    assert refusal(response) == (409, "run_finished")


@pytest.mark.parametrize("task", [True, False])
async def test_with_an_idempotency_key_the_grant_comes_home(pair: Lab, task: bool) -> None:
    """One rank opens, whatever becomes of the others, since it alone keeps the answer."""
    ranks = [Slots(rank, trainers=1) for rank in pair.ranks]
    home = 0 if task else home_of("key k", range(2))
    body, key = {"task_id": task_of(0)} if task else {}, {"Idempotency-Key": "k"}
    ranks[1 - home].grants = 2
    for left in (1, 0):
        assert await opened(pair, body, **key) == on(home, granted=True)
        assert ranks[1 - home].grants == left
    assert await opened(pair, body, **key) == on(home, granted=False)
    assert await opened(pair, body, **key) == 429
    asked = {r.target for r in pair.ranks[1 - home].received}
    assert asked == {GRANT}
    sent = [r for r in pair.ranks[home].received if r.target == START]
    assert {r.body for r in sent} == {json.dumps(body).encode()}, "the same for its key"


async def test_with_an_idempotency_key_home_is_waited_for(start_lab: StartLab) -> None:
    lab = await start_lab("server.rank_wait=0.1", ranks=2)
    for rank in lab.ranks:
        Slots(rank, grants=1)
    await lab.ranks[0].kill()
    assert await opened(lab, {"task_id": task_of(0)}, **{"Idempotency-Key": "k"}) == 503
    assert await opened(lab, {"task_id": task_of(0)}) == on(1, granted=True)


async def test_what_a_rank_refuses_is_told_and_no_other_one_is_asked(pair: Lab) -> None:
    pair.ranks[0].handler = refuses("invalid_request", 400)
    Slots(pair.ranks[1], grants=1)
    assert await opened(pair, {"task_id": task_of(0), "x": 1}) == 400
    assert not pair.ranks[1].received


async def test_a_key_is_reused_at_its_rank(pair: Lab) -> None:
    ranks = [Slots(rank, trainers=1) for rank in pair.ranks]
    task = task_of(0)
    assert await opened(pair, {"task_id": task, "api_key": pair.key(0)}) == on(0, granted=False)
    other = await pair.post(START, {"task_id": task, "api_key": pair.key(1)})
    assert refusal(other) == (409, "lane_on_other_rank")
    ranks[0].grants = 1
    assert await opened(pair, {"task_id": task, "api_key": pair.key(1)}) == on(1, granted=True)
    assert await opened(pair, {"api_key": pair.key(1)}) == on(1, granted=False)


async def test_a_dead_ranks_grants_are_passed_over(pair: Lab) -> None:
    Slots(pair.ranks[0])
    pair.ranks[1].handler = die
    assert await opened(pair, {"task_id": task_of(0)}) == 429
    assert await opened(pair, {"task_id": task_of(0)}, **{"Idempotency-Key": "k"}) == 429


async def test_a_quota_moves_no_grant(pair: Lab) -> None:
    pair.ranks[0].handler = refuses("quota_exceeded", 429)
    there = Slots(pair.ranks[1], grants=1)
    body = {"task_id": task_of(0)}
    assert await opened(pair, body, **{"Idempotency-Key": "k"}) == 429
    assert len(pair.ranks[0].received) == 1
    assert await opened(pair, body) == on(1, granted=True), "another rank's share"
    assert there.grants == 0


async def test_a_slot_that_cannot_arrive_goes_back(pair: Lab) -> None:
    there = Slots(pair.ranks[1], grants=1)
    home = Slots(pair.ranks[0])

    async def takes_none(received: Received) -> None:
        if received.target == GRANT:
            await received.answer({"error": {"code": "store_full"}}, status=507)
        else:
            await home.answer(received)

    pair.ranks[0].handler = takes_none
    assert await opened(pair, {"task_id": task_of(0)}, **{"Idempotency-Key": "k"}) == 429
    assert there.grants == 1


async def test_a_grant_goes_where_an_open_waits(pair: Lab) -> None:
    waits = asyncio.Event()
    granted = asyncio.Event()

    async def wait(received: Received) -> None:
        if received.target == GRANT and "change" not in received.json:
            granted.set()
            await received.answer({"capacity": 1})
        elif received.values(GRANT_ONLY_HEADER) or received.target != START:
            await received.answer(NO_SLOT, status=429)
        else:
            waits.set()
            await granted.wait()
            await received.answer(on(1, granted=True))

    Slots(pair.ranks[0])
    pair.ranks[1].handler = wait
    waiting = asyncio.create_task(opened(pair, {"api_key": pair.key(1)}))
    await waits.wait()
    assert (await pair.post("/grant_capacity")).json() == {"capacity": 1}
    assert await waiting == on(1, granted=True)


async def test_a_malformed_open_is_passed_to_one_rank(pair: Lab) -> None:
    for body in (b"{", b"[]", b"{}", b'{"task_id": 5}'):
        assert (await pair.post(START, body)).status_code == 200
    assert sum(len(rank.received) for rank in pair.ranks) == 4


async def test_an_id_names_its_rank_in_the_body_and_before_the_path(pair: Lab) -> None:
    for session in ("task-0-1-0", "ses-1-0123456789abcdef"):
        for _ in range(3):
            await pair.post("/export_trajectories", {"session_id": session})
    for path in ("v1/chat/completions", "chat/completions", "rl/set_reward", "rl/end_session"):
        await pair.post(f"/task-0-1-7/{path}", {"reward": 1})
    assert [len(rank.received) for rank in pair.ranks] == [0, 10]
    assert all(r.target.startswith("/task-0-1-7/") for r in pair.ranks[1].received[6:])


async def test_health_counts_the_ranks(pair: Lab) -> None:
    assert (await pair.get("/health")).json() == {"status": "ok", "workers": 2}


async def test_a_move_that_is_answered_late_is_made_once(
    pair: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has it, and says so only when it is asked again under the same key."""
    monkeypatch.setattr("router.areal.MOVE_TIMEOUT", 0.8)
    Slots(pair.ranks[1])
    slots, keys, released = Slots(pair.ranks[0]), [], asyncio.Event()

    async def late(received: Received) -> None:
        if received.target != GRANT or received.json.get("change") is None:
            await slots.answer(received)
            return
        keys.append(received.values("idempotency-key")[0])
        if len(keys) == 1:
            slots.grants += 1
            await released.wait()
            return
        await received.answer({"capacity": slots.grants})

    pair.ranks[0].handler = late
    await pair.post("/grant_capacity", {"task_id": task_of(1, 2)})
    body = {"task_id": task_of(0, 2)}
    assert await opened(pair, body, **{"Idempotency-Key": "k"}) == on(0, granted=True)
    released.set()
    assert len(keys) == 2 and len(set(keys)) == 1
