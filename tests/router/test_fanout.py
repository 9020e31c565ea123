"""The operator's routes over all ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import fanout
from router.fanout import newest
from tests.router.test_affinity import IDS
from tests.support.proxy import until
from tests.support.router import Lab, Received, says

CAPACITY = {"admitted": 3, "reserved": 1, "waiting": 2, "running": 4, "buffered": 5, "limit": 9}


async def away(lab: Lab, number: int) -> None:
    await lab.ranks[number].kill()
    lab.router.ranks.mark_failed(number)


async def test_capacity_is_summed(pair: Lab) -> None:
    other = {name: 10 * value for name, value in CAPACITY.items()}
    pair.handle(says(CAPACITY | {"queue": [1, 2]}), says(other | {"queue": []}))
    for response in (
        await pair.get("/rl/v1/capacity"),
        await pair.http.put("/rl/v1/capacity", json={"limit": 9}),
    ):
        assert response.json() == {
            **{name: 11 * value for name, value in CAPACITY.items()},
            "ranks": {"0": CAPACITY | {"queue": [1, 2]}, "1": other | {"queue": []}},
            "unreachable": [],
        }
    for rank in pair.ranks:
        assert [r.method for r in rank.received] == ["GET", "PUT"]
        assert rank.received[1].json == {"limit": 9}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/rl/v1/run"),
        ("PUT", "/rl/v1/run"),
        ("GET", "/rl/v1/version"),
        ("POST", "/rl/v1/version"),
        ("POST", "/rl/v1/pause"),
        ("POST", "/rl/v1/resume"),
    ],
)
async def test_the_rank_that_is_behind_speaks_for_all(pair: Lab, method: str, path: str) -> None:
    pair.handle(
        says({"version": 5, "state": "training"}), says({"version": 4, "state": "finished"})
    )
    data = (await pair.http.request(method, path, json={"x": 1})).json()
    assert (data["version"], data["state"]) == (4, "finished")
    assert {rank: one["version"] for rank, one in data["ranks"].items()} == {"0": 5, "1": 4}
    assert data["unreachable"] == []


@pytest.mark.parametrize("how", ["away", "dies", "hangs", "fails"])
async def test_a_rank_that_does_not_answer_is_named(
    pair: Lab, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(fanout, "READ_TIMEOUT", 2.0)
    error = {"error": {"code": "engine_unavailable"}}

    async def handler(received: Received) -> None:
        if how == "dies":
            received.die()
        elif how == "hangs":
            await asyncio.Event().wait()
        else:
            await received.answer(error, status=503)

    pair.ranks[1].handler = says(CAPACITY)
    pair.ranks[0].handler = handler
    if how == "away":
        await away(pair, 0)
    data = (await pair.get("/rl/v1/capacity")).json()
    assert data["unreachable"] == [0]
    assert data["admitted"] == CAPACITY["admitted"]
    assert data["ranks"] == {"1": CAPACITY} | ({"0": error} if how == "fails" else {})
    if how == "hangs":
        await until(pair.ranks[0].left.is_set, "the request is given up")
    if how == "fails":
        pair.ranks[1].handler = handler
        response = await pair.get("/rl/v1/capacity")
        assert (response.status_code, response.json()) == (503, error), "all of them do"


async def test_without_any_rank_reads_are_refused_with_503(pair: Lab) -> None:
    for number in range(2):
        await away(pair, number)
    for path in ("/rl/v1/capacity", "/rl/v1/sessions", "/rl/v1/run"):
        response = await pair.get(path)
        assert response.status_code == 503
        assert response.headers["retry-after"]


async def test_refusals_of_a_rank_are_passed_on(pair: Lab) -> None:
    pair.handle(says(CAPACITY), says({"error": {"code": "forbidden"}}, status=403))
    for path in ("/rl/v1/capacity", "/rl/v1/sessions", "/rl/v1/run"):
        response = await pair.get(path)
        assert response.status_code == 403
        assert response.json() == {"error": {"code": "forbidden"}}


def line(number: int) -> dict[str, Any]:
    return {"number": number, "created_at": float(number)}


async def test_sessions_of_all_ranks_are_one_list(pair: Lab) -> None:
    pair.handle(says([line(k) for k in (9, 5, 1)]), says([line(k) for k in (8, 6, 0)]))
    response = await pair.get("/rl/v1/sessions?limit=4")
    assert [session["number"] for session in response.json()] == [9, 8, 6, 5]
    assert response.headers["x-any-agent-after"] == "0:5,1:6"
    assert "x-any-agent-unreachable" not in response.headers
    assert [r.target for r in pair.ranks[0].received] == ["/rl/v1/sessions?limit=4"]
    assert len((await pair.get("/rl/v1/sessions")).json()) == 6
    assert len((await pair.get("/rl/v1/sessions?limit=4.0")).json()) == 4
    await away(pair, 1)
    response = await pair.get("/rl/v1/sessions")
    assert [session["number"] for session in response.json()] == [9, 5, 1]
    assert response.headers["x-any-agent-unreachable"] == "1"
    assert "x-any-agent-after" not in response.headers


async def test_sessions_that_a_page_had_no_room_for_are_on_the_next_page(pair: Lab) -> None:
    pair.handle(says([line(9), line(5)], headers={"x-any-agent-after": "0:5"}), says([line(8)]))
    response = await pair.get("/rl/v1/sessions?limit=3")
    assert response.headers["x-any-agent-after"] == "0:5,1:1"
    target = "/rl/v1/sessions?limit=3&after=0:5,1:1"
    pair.handle(says([]), says([]))
    response = await pair.get(target)
    assert pair.ranks[1].received[-1].target == target
    assert "x-any-agent-after" not in response.headers


async def test_a_session_key_asks_its_own_rank_alone(pair: Lab) -> None:
    pair.ranks[1].handler = says({"version": 3})
    assert (await pair.get("/rl/v1/version", pair.key(1))).json() == {"version": 3}
    assert not pair.ranks[0].received


NAMED = "X-Any-Agent-Session"
WRITES = [
    ("PUT", "/rl/v1/capacity"),
    ("PUT", "/rl/v1/run"),
    ("POST", "/rl/v1/pause"),
    ("POST", "/rl/v1/resume"),
    ("POST", "/rl/v1/version"),
]


async def test_a_session_that_is_named_beside_changes_nothing(pair: Lab) -> None:
    """Else a pause, or a version, that is for all ranks would reach one of them."""
    pair.handle(says(CAPACITY | {"version": 3}))
    for method, path in (*WRITES, ("GET", "/rl/v1/run")):
        for query, headers in ((f"?session_id={IDS[1]}", {}), ("", {NAMED: IDS[1]})):
            response = await pair.http.request(
                method, path + query, json={"limit": 9}, headers=headers
            )
            assert sorted(response.json()["ranks"]) == ["0", "1"], (method, path, query)
    for rank in pair.ranks:
        # A rank refuses sessions of others, where it looks.
        assert [received.values(NAMED) for received in rank.received] == [[]] * 12


async def test_the_callers_key_reaches_every_rank(pair: Lab) -> None:
    pair.handle(says({"version": 3}))
    await pair.get("/rl/v1/run", "operator-secret", **{"Accept-Encoding": "gzip"})
    for rank in pair.ranks:
        (received,) = rank.received
        assert received.values("authorization") == ["Bearer operator-secret"]
        # The answer is read here, so it must not be compressed.
        assert not received.values("accept-encoding")


def page(times: list[float], before: int | None, limit: int) -> tuple[list[Any], int | None]:
    """As a rank answers: numbers below ``before``, the highest first."""
    before = len(times) + 1 if before is None else before
    numbers = range(min(before - 1, len(times)), 0, -1)[:limit]
    lines = [{"number": n, "created_at": times[n - 1]} for n in numbers]
    lowest = lines[-1]["number"] if len(lines) == limit else 1
    return lines, lowest if lowest > 1 else None


@given(
    ranks=st.lists(st.lists(st.floats(0, 9), max_size=9), min_size=1, max_size=3),
    limit=st.integers(1, 9),
)
def test_pages_hold_each_session_once(ranks: list[list[float]], limit: int) -> None:
    # A clock that is set back puts no session of a rank before a newer one of it.
    places: dict[int, int] | None = {}
    found: list[tuple[int, int]] = []
    for _ in range(100):
        assert places is not None
        answers, ends = {}, {}
        for rank, times in enumerate(ranks):
            answers[rank], ends[rank] = page(times, places.get(rank), limit)
            for each in answers[rank]:
                each["rank"] = rank
        shown, places = newest(answers, ends, places, limit)
        assert len(shown) <= limit
        found += [(each["rank"], each["number"]) for each in shown]
        if places is None:
            break
    expected = {(r, n + 1) for r, times in enumerate(ranks) for n in range(len(times))}
    assert len(found) == len(expected) and set(found) == expected
    for rank in range(len(ranks)):
        mine = [number for owner, number in found if owner == rank]
        assert mine == sorted(mine, reverse=True)


def test_a_rank_that_is_away_is_asked_for_the_same_again() -> None:
    lines = [{"number": 3, "created_at": 3.0}, {"number": 2, "created_at": 2.0}]
    shown, places = newest({0: lines}, {0: 2}, {0: 4, 1: 7}, 9)
    assert [each["number"] for each in shown] == [3, 2]
    assert places == {0: 2, 1: 7}


@pytest.mark.parametrize(
    ("answers", "status", "code"),
    [
        ((404, 404), 404, "no_known_task"),
        ((404, 503), 503, "engine_unavailable"),
        ((404, None), 503, "service_unavailable"),
        ((403, 404), 403, "forbidden"),
    ],
)
async def test_no_rank_knows_a_task_only_if_all_say_so(
    pair: Lab, answers: tuple[int | None, ...], status: int, code: str
) -> None:
    codes = {404: "no_known_task", 503: "engine_unavailable", 403: "forbidden"}
    for number, answer in enumerate(answers):
        if answer is None:
            await away(pair, number)
        else:
            error = {"error": {"code": codes[answer]}}
            pair.ranks[number].handler = says(error, status=answer)
    response = await pair.get("/rl/v1/tasks/next")
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
