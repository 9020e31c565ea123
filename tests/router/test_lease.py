"""Acks, exports and leases of sessions that live on several ranks."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from router import lease as leasing
from tests.router.conftest import StartLab
from tests.support.proxy import until
from tests.support.router import FakeRank, Lab, Received, answer_empty, die, refusal, refuses, sends

A, B, C = "ses-0-000000000000000a", "ses-1-000000000000000b", "ses-0-000000000000000c"
NOTHING = b"HTTP/1.1 204 No Content\r\n\r\n"


async def ack(received: Received) -> None:
    body = received.json
    await received.answer({"acked": len(body["trained"]) + len(body["rejected"])})


async def export(received: Received) -> None:
    rows = {id: {"row": id} for id in received.json["session_ids"]}
    await received.answer({"style": "concat", "discount": 0.5, "trajectories": rows})


async def test_acks_are_split_and_counted(pair: Lab) -> None:
    pair.handle(ack)
    rejected = [{"session_id": C, "reason": "stale"}]
    body = {"owner": "me", "trained": [A, B], "rejected": rejected}
    assert (await pair.post("/rl/v1/ack", body)).json() == {"acked": 3}
    assert pair.ranks[0].received[0].json == {"owner": "me", "trained": [A], "rejected": rejected}
    assert pair.ranks[1].received[0].json == {"owner": "me", "trained": [B], "rejected": []}


@pytest.mark.parametrize("where", ["header", "query"])
async def test_a_session_that_is_named_beside_changes_nothing(pair: Lab, where: str) -> None:
    pair.handle(ack)
    query, headers = (f"?session_id={B}", {}) if where == "query" else ("", {NAMED: B})
    data = {"owner": "me", "trained": [A, B]}
    answer = await pair.post(f"/rl/v1/ack{query}", data, **headers)
    assert answer.json() == {"acked": 2}
    pair.ranks[0].handler = answer_empty
    wanted = {"owner": "me", "session_ids": [A]}
    assert (await pair.post(f"/rl/v1/lease{query}", wanted, **headers)).status_code == 200
    assert [len(rank.received) for rank in pair.ranks] == [2, 1]


NAMED = "X-Any-Agent-Session"


async def test_an_ack_that_one_rank_refuses_is_refused(pair: Lab) -> None:
    pair.handle(ack, refuses("lease_lost", 409))
    response = await pair.post("/rl/v1/ack", {"owner": "me", "trained": [A, B]})
    assert refusal(response) == (409, "lease_lost")


async def test_an_ack_whose_rank_stays_away_is_to_be_repeated(start_lab: StartLab) -> None:
    lab = await start_lab("server.rank_wait=0.3", ranks=2)
    lab.handle(ack)
    await lab.ranks[1].kill()
    response = await lab.post("/rl/v1/ack", {"owner": "me", "trained": [A, B]})
    assert response.status_code == 503
    assert response.headers["retry-after"]


async def test_exports_are_merged_in_the_order_asked_for(pair: Lab) -> None:
    pair.handle(export)
    response = await pair.post("/rl/v1/export_trajectories", {"session_ids": [C, B, A]})
    assert response.json() == {
        "style": "concat",
        "discount": 0.5,
        "trajectories": {id: {"row": id} for id in (C, B, A)},
    }
    assert list(response.json()["trajectories"]) == [C, B, A]
    # One of one rank is passed on as it is.
    body = b'{"session_ids": ["%s", "%s"]}' % (A.encode(), C.encode())
    await pair.post("/rl/v1/export_trajectories", body)
    assert [len(rank.received) for rank in pair.ranks] == [2, 1]
    assert pair.ranks[0].received[1].body == body


@pytest.mark.parametrize("path", ["/rl/v1/ack", "/rl/v1/export_trajectories", "/rl/v1/lease"])
@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b'{"trained": 7, "session_ids": 7, "wait": "x"}', b'{"session_ids": ["x"]}'],
)
async def test_malformed_bodies_are_a_ranks_business(pair: Lab, path: str, body: bytes) -> None:
    await pair.post(path, body)
    assert [r.body for rank in pair.ranks for r in rank.received] == [body]


async def test_sessions_of_an_unknown_rank_are_refused_and_reach_no_rank(pair: Lab) -> None:
    stranger = "ses-5-0000000000000000"
    for path, body in (
        ("/rl/v1/ack", {"owner": "me", "trained": [A, stranger]}),
        ("/rl/v1/export_trajectories", {"session_ids": [A, stranger]}),
        ("/rl/v1/lease", {"owner": "me", "session_ids": [stranger]}),
    ):
        response = await pair.post(path, body)
        assert refusal(response) == (404, "unknown_rank")
    assert not any(rank.received for rank in pair.ranks)


class Shelf:
    """What a rank has ready."""

    def __init__(self, rank: FakeRank) -> None:
        self.ready: asyncio.Queue[bytes] = asyncio.Queue()
        self.waits: list[float] = []
        rank.handler = self._handle

    async def _handle(self, received: Received) -> None:
        wait = float(received.json["wait"])
        self.waits.append(wait)
        try:
            if wait:
                async with asyncio.timeout(wait):
                    found = await self.ready.get()
            else:
                found = self.ready.get_nowait()
        except (TimeoutError, asyncio.QueueEmpty):
            await received.send(NOTHING)
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-msgpack\r\ncontent-length: %d\r\n"
        await received.send(head % len(found) + b"\r\n" + found)


async def lease(lab: Lab, **fields: Any) -> httpx.Response:
    return await lab.post("/rl/v1/lease", {"owner": "me", **fields})


async def test_what_is_ready_is_handed_out_at_once_from_each_rank_in_turn(pair: Lab) -> None:
    shelves = [Shelf(rank) for rank in pair.ranks]
    for k in range(6):
        shelves[k % 2].ready.put_nowait(b"%d" % (k % 2))
    found = [await lease(pair, wait=0) for _ in range(7)]
    for first in (0, 2, 4):
        assert sorted(r.content for r in found[first : first + 2]) == [b"0", b"1"]
    assert [r.status_code for r in found] == [200] * 6 + [204]
    assert found[0].headers["content-type"] == "application/x-msgpack"


async def test_a_poll_of_ranks_that_hang_up_asks_each_once_and_ends(start_lab: StartLab) -> None:
    lab = await start_lab("server.rank_wait=0.5", ranks=2)
    for rank in lab.ranks:
        rank.handler = die
        lab.silent.add(rank.number)
    assert (await lease(lab, wait=0)).status_code == 503
    assert [len(rank.received) for rank in lab.ranks] == [1, 1]


async def test_a_poll_sees_every_rank_and_survives_one(
    pair: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "SLICE", 0.05)
    shelves = [Shelf(rank) for rank in pair.ranks]
    for number in (0, 1, 1, 0):
        call = asyncio.create_task(lease(pair, wait=60))
        seen = [len(shelf.waits) for shelf in shelves]
        await until(
            lambda seen=seen: all(len(s.waits) > n + 2 for s, n in zip(shelves, seen, strict=True)),
            "both ranks are polled",
        )
        shelves[number].ready.put_nowait(b"group")
        assert (await call).content == b"group"
    call = asyncio.create_task(lease(pair, wait=60))
    await until(lambda: sum(len(shelf.waits) for shelf in shelves) > 20, "the ranks are polled")
    await pair.ranks[0].kill()
    await until(lambda: pair.router.ranks.live == [1], "the death is noticed")
    shelves[1].ready.put_nowait(b"group")
    assert (await call).content == b"group"


async def test_a_poller_that_leaves_is_handed_nothing(pair: Lab) -> None:
    shelves = [Shelf(rank) for rank in pair.ranks]
    wire = await pair.raw("POST /rl/v1/lease", body=b'{"owner": "me", "wait": 60}')
    await until(lambda: any(wait > 0 for shelf in shelves for wait in shelf.waits), "it waits")
    wire.close()
    await until(lambda: any(rank.left.is_set() for rank in pair.ranks), "the poll is ended")


async def test_sessions_by_name_come_from_their_rank(pair: Lab) -> None:
    shelves = [Shelf(rank) for rank in pair.ranks]
    shelves[1].ready.put_nowait(b"it")
    response = await lease(pair, wait=0, session_ids=[B], replay=True)
    assert response.content == b"it"
    assert pair.ranks[1].received[0].json["replay"] is True
    assert not pair.ranks[0].received
    response = await lease(pair, wait=0, session_ids=[A, B])
    assert response.status_code == 400
    assert "ranks 0, 1" in response.json()["error"]["message"]


@pytest.mark.parametrize("form", ["each", "json"])
async def test_sessions_in_a_query_are_split(pair: Lab, form: str) -> None:
    pair.handle(export)
    names = [("session_ids", id) for id in (A, B, C)]
    if form == "json":
        names = [("session_ids", json.dumps([A, B, C]))]
    query = urlencode([*names, ("discount", "0.5")])
    response = await pair.post(f"/rl/v1/export_trajectories?{query}", b"")
    assert list(response.json()["trajectories"]) == [A, B, C]
    first, second = (rank.received[0] for rank in pair.ranks)
    assert (first.json, second.json) == ({"session_ids": [A, C]}, {"session_ids": [B]})
    assert first.target == second.target == "/rl/v1/export_trajectories?discount=0.5"


async def test_an_ack_and_a_poll_may_have_their_fields_in_the_query(pair: Lab) -> None:
    pair.handle(ack)
    answer = await pair.post(f"/rl/v1/ack?owner=me&trained={A}&trained={B}", b"")
    assert answer.json() == {"acked": 2}

    pair.handle(sends(NOTHING))
    assert (await pair.post("/rl/v1/lease?owner=me&wait=0", b"")).status_code == 204
    assert pair.ranks[0].received[-1].json == {"wait": 0.0}
    assert pair.ranks[0].received[-1].target == "/rl/v1/lease?owner=me"
