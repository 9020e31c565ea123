"""The router while ranks come and go: who is asked for what."""

from __future__ import annotations

import pytest

from any_agent.rundir.fleet import Fleet, save_fleet
from router.affinity import home_of, homes_of
from router.open_session import START
from tests.router.conftest import StartLab
from tests.router.test_implicit_affinity import IMPLICIT
from tests.support.proxy import until
from tests.support.router import FakeRank, Lab, Received, refusal, refuses

HEADER = "x-any-agent-fleet"
GROWN = Fleet.of(2).with_state(2, "joining").with_state(2, "serving")
MOVED = next(f"g{k}" for k in range(100) if homes_of(f"g{k}", GROWN) != [home_of(f"g{k}", [0, 1])])
"""A group whose home would be another rank now."""


async def set_fleet(lab: Lab, fleet: Fleet) -> None:
    save_fleet(lab.registry.parent / "fleet.json", fleet)
    await until(lambda: lab.router.ranks.fleet == fleet, "the router sees the fleet")


def told(rank: FakeRank) -> list[str]:
    return [value for received in rank.received for value in received.values(HEADER)]


@pytest.fixture
async def grown(start_lab: StartLab) -> Lab:
    lab = await start_lab(ranks=3)
    await set_fleet(lab, GROWN)
    return lab


@pytest.mark.parametrize("fields", [{"group_id": MOVED}, {"task_id": MOVED}])
async def test_a_group_is_where_it_was_born(grown: Lab, fields: dict[str, str]) -> None:
    before, now = homes_of(MOVED, GROWN)
    assert now == 2
    assert (await grown.post(START, fields)).status_code == 200
    assert told(grown.ranks[before]) == ["2 member"]
    assert not grown.ranks[now].received, "the group has been found"


async def test_a_group_begins_where_it_would_be_born_now(grown: Lab) -> None:
    before, now = homes_of(MOVED, GROWN)
    grown.ranks[before].handler = refuses("misdirected", 421)
    assert (await grown.post(START, {"group_id": MOVED})).status_code == 200
    assert (told(grown.ranks[before]), told(grown.ranks[now])) == (["2 member"], ["2"])


async def test_an_idempotency_key_is_known_where_it_was_answered(grown: Lab) -> None:
    key = next(f"k{k}" for k in range(100) if len(homes_of(f"key k{k}", GROWN)) == 2)
    before, now = homes_of(f"key {key}", GROWN)
    assert (await grown.post(START, {}, **{"Idempotency-Key": key})).status_code == 200
    assert (told(grown.ranks[before]), told(grown.ranks[now])) == (["2 member"], [])


async def test_a_rank_that_knows_a_newer_fleet_sends_the_router_back(grown: Lab) -> None:
    before, now = homes_of(MOVED, GROWN)
    shrunk = GROWN.with_state(2, "draining")
    rank = grown.ranks[before]

    async def handler(received: Received) -> None:
        member = received.values(HEADER) == ["2 member"]
        await received.answer({"session_id": "s"}, status=421 if member else 200)

    async def away(received: Received) -> None:
        save_fleet(grown.registry.parent / "fleet.json", shrunk)
        error = {"message": "chosen by an old fleet", "code": "misdirected"}
        await received.answer({"error": error}, status=421)

    rank.handler, grown.ranks[now].handler = handler, away
    assert (await grown.post(START, {"group_id": MOVED})).status_code == 200
    assert told(rank) == ["2 member", "3"]


async def test_a_draining_rank_is_left_for_the_present_home(grown: Lab) -> None:
    """Its queue was closed while an open waited in it."""
    group = next(f"g{k}" for k in range(100) if homes_of(f"g{k}", GROWN) == [0])
    shrunk = GROWN.with_state(0, "draining")

    async def handler(received: Received) -> None:
        if "member" in received.values(HEADER)[0]:
            await received.answer({}, status=421)
            return
        save_fleet(grown.registry.parent / "fleet.json", shrunk)
        error = {"message": "this rank is drained", "code": "draining"}
        await received.answer({"error": error}, status=503)

    grown.ranks[0].handler = handler
    assert (await grown.post(START, {"group_id": group})).status_code == 200
    assert told(grown.ranks[0]) == ["2", "3 member"]
    assert told(grown.ranks[homes_of(group, shrunk)[-1]]) == ["3"]


async def test_a_rank_that_stops_does_not_change_the_fleet(grown: Lab) -> None:
    group = next(f"g{k}" for k in range(100) if homes_of(f"g{k}", GROWN) == [0])
    grown.ranks[0].handler = refuses("draining", 503)
    answer = await grown.post(START, {"group_id": group})
    assert refusal(answer) == (503, "draining")
    assert len(grown.ranks[0].received) == 1


async def test_clients_cannot_set_the_routers_fleet_headers(grown: Lab) -> None:
    for path in (START, "/v1/models"):
        await grown.post(path, {"group_id": "g"}, **{HEADER: "99 member"})
    assert {value for rank in grown.ranks for value in told(rank)} <= {"2", "2 member"}


async def test_only_ranks_that_serve_get_new_sessions(grown: Lab) -> None:
    fleet = GROWN.with_state(0, "draining").with_state(3, "joining")
    await set_fleet(grown, fleet)
    for _ in range(6):
        assert (await grown.post(START, {})).status_code == 200
        assert (await grown.get("/v1/models")).status_code == 200
    draining, *serving = (len(rank.received) for rank in grown.ranks)
    # Which of two equals is taken is left to chance, so they differ by a few.
    assert draining == 0 and sum(serving) == 12 and min(serving) >= 4
    ranks = (await grown.get("/healthz")).json()["ranks"]
    found = [(rank, told["fleet"]) for rank, told in ranks.items()]
    assert found == [("0", "draining"), ("1", "serving"), ("2", "serving"), ("3", "joining")]
    # Its sessions are served as before.
    assert (await grown.get("/v1/models", grown.key(0))).status_code == 200
    assert len(grown.ranks[0].received) == 1


async def test_a_rank_that_has_ended_has_no_sessions(grown: Lab) -> None:
    await set_fleet(grown, GROWN.with_state(0, "draining").with_state(0, None))
    answer = await grown.get("/v1/models", grown.key(0))
    assert refusal(answer) == (404, "unknown_rank")
    answer = await grown.get("/rl/v1/run")
    assert answer.status_code != 404
    assert not grown.ranks[0].received


async def test_a_conversation_goes_to_the_rank_that_has_its_session(start_lab: StartLab) -> None:
    lab = await start_lab(*IMPLICIT, ranks=3)
    await set_fleet(lab, GROWN)
    for rank in lab.ranks[:2]:
        rank.handler = refuses("misdirected", 421)
    for k in range(24):
        body = {"model": "m", "messages": [{"role": "user", "content": f"hello {k}"}]}
        answer = await lab.post("/v1/chat/completions", body)
        # Ranks 0 and 1 have no session, and know no newer fleet.
        assert answer.status_code in (200, 503)
    assert set(told(lab.ranks[2])) == {"2"}
    assert {"2", "2 member"} == {value for rank in lab.ranks[:2] for value in told(rank)}
