"""Ranks that die at every moment of a call, and clients that leave, stall or dawdle."""

from __future__ import annotations

import asyncio
from itertools import chain, repeat
from unittest.mock import Mock

import pytest

from any_agent.errors import ReplyLost
from router import rank_health as health
from router.client_response import ClientResponder
from tests.router.conftest import StartLab
from tests.support.proxy import LIMIT, until
from tests.support.router import Lab, Received, die, never, once_set, refusal


@pytest.mark.parametrize("how", ["chunked", "length", "politely"])
async def test_death_amid_an_answer_aborts_the_client(lab: Lab, how: str) -> None:
    async def answer(received: Received) -> None:
        if how == "length":
            head = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n"
            await received.send(head + b"data: 1\n\n")
        else:
            await received.begin()
            await received.chunk(b"data: 1\n\n")
        await go.wait()
        if how == "politely":
            received.writer.close()
        else:
            received.die()

    go = asyncio.Event()
    lab.ranks[0].handler = answer
    wire = await lab.raw("POST /v1/x", body=b"{}")
    await wire.head()
    begun = b"data: 1\n\n" if how == "length" else b"9\r\ndata: 1\n\n\r\n"
    assert await wire.take(len(begun)) == begun
    go.set()
    rest, _ = await wire.rest()
    # Neither the terminating chunk nor an error that looks like part of the answer.
    assert rest == b""
    assert lab.router.replies.broken == 1


@pytest.mark.parametrize("how", ["silent", "half a head", "half a body", "garbled"])
async def test_death_before_the_answer_is_a_lost_reply(lab: Lab, how: str) -> None:
    async def answer(received: Received) -> None:
        if how == "half a head":
            await received.send(b"HTTP/1.1 200 OK\r\ncontent-le")
        elif how == "half a body":
            await received.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc")
        elif how == "garbled":
            await received.send(b"not HTTP at all\r\n\r\n")
        received.writer.close()

    lab.ranks[0].handler = answer
    response = await lab.post("/v1/chat/completions", {"model": "m"})
    assert response.status_code == 502
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == ReplyLost.default_code
    assert len(lab.ranks[0].received) == 1, "it was sent again"
    assert lab.router.forwarder.lost == 1


@pytest.mark.parametrize(
    ("path", "header", "again"),
    [
        ("/v1/chat/completions", "x-stainless-retry-count", "true"),
        ("/v1/chat/completions", "Idempotency-Key", "false"),
        ("/rl/v1/start_session", "Idempotency-Key", "true"),
        ("/rl/v1/set_reward", "Idempotency-Key", "true"),
        ("/grant_capacity", "Idempotency-Key", "true"),
        ("/rl/v1/finalize", "x-stainless-retry-count", "false"),
    ],
)
async def test_a_lost_reply_says_whether_the_client_may_ask_again(
    lab: Lab, path: str, header: str, again: str
) -> None:
    lab.ranks[0].handler = die
    response = await lab.post(path, {"model": "m"}, **{header: "0"})
    assert response.status_code == 502
    assert response.headers["x-should-retry"] == again
    assert len(lab.ranks[0].received) == 1, "it was sent again"


@pytest.mark.parametrize("route", ["start_session", "%73tart_session"])
@pytest.mark.parametrize("query", ["mode=eval", "group_id=g", "session_id=ses-0-0123456789abcdef"])
async def test_a_session_is_never_opened_twice(lab: Lab, query: str, route: str) -> None:
    """A lost GET is repeated, unless it opens a session; aiohttp would repeat it by itself."""
    lab.ranks[0].handler = die
    wire = await lab.raw(f"GET /rl/v1/{route}?{query}")
    assert " 502 " in await wire.head()
    assert len(lab.ranks[0].received) == 1


async def test_a_lost_read_is_repeated_once(lab: Lab) -> None:
    async def once(received: Received) -> None:
        if len(lab.ranks[0].received) == 1:
            received.die()
        else:
            await received.answer({"n": 2})

    lab.ranks[0].handler = once
    assert (await lab.get("/v1/models")).json() == {"n": 2}
    lab.ranks[0].handler = die
    assert (await lab.get("/v1/models")).status_code == 502
    assert len(lab.ranks[0].received) == 4


@pytest.mark.parametrize("size", [2, 500_000])
async def test_a_request_waits_for_its_rank(lab: Lab, size: int) -> None:
    """A long one unread."""
    rank = lab.ranks[0]
    await rank.kill()
    body = b"x" * size
    call = asyncio.create_task(lab.post("/v1/x", body, lab.key(0)))
    await until(lambda: lab.router.ranks.waiting == 1, "the request waits")
    assert lab.router.forwarder.retried == 1, "it was tried over and over"
    await lab.restart(rank)
    assert (await call).status_code == 200
    assert [r.body for r in rank.received] == [body]


async def test_a_request_for_a_rank_that_stays_away_is_refused_with_503(
    start_lab: StartLab,
) -> None:
    lab = await start_lab("server.rank_wait=0.3")
    await lab.ranks[0].kill()
    response = await lab.post("/v1/x", {}, lab.key(0))
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert "x-should-retry" not in response.headers
    assert lab.router.ranks.waiting == 0


async def test_waiting_requests_are_bounded(
    start_lab: StartLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MAX_WAITING", 2)
    lab = await start_lab()
    await lab.ranks[0].kill()
    key = lab.key(0)
    calls = [asyncio.create_task(lab.post("/v1/x", {}, key)) for _ in range(2)]
    await until(lambda: lab.router.ranks.waiting == 2, "two requests wait")
    refused = await lab.post("/v1/x", {}, key)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    await lab.restart(lab.ranks[0])
    assert [(await call).status_code for call in calls] == [200, 200]


async def test_requests_under_way_are_bounded(
    start_lab: StartLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.entrance.MAX_REQUESTS", 4)
    lab = await start_lab()
    go = asyncio.Event()

    lab.ranks[0].handler = once_set(go)
    key = lab.key(0)
    calls = [asyncio.create_task(lab.post("/v1/x", {}, key)) for _ in range(3)]
    await until(lambda: len(lab.ranks[0].received) == 3, "three requests are under way")
    # One key leaves a place for others, ...
    refused = await lab.post("/v1/x", {}, key)
    assert refusal(refused) == (429, "too_many_of_key")
    assert refused.headers["retry-after"] == "2"
    # ... and all keys together as many as there are.
    calls.append(asyncio.create_task(lab.post("/v1/x", {}, lab.key(0))))
    await until(lambda: len(lab.ranks[0].received) == 4, "four requests are under way")
    refused = await lab.post("/v1/x", {}, lab.key(0))
    assert refusal(refused) == (503, "too_many_requests")
    assert refused.headers["retry-after"] == "2"
    go.set()
    assert [(await call).status_code for call in calls] == [200] * 4
    assert (await lab.post("/v1/x", {}, key)).status_code == 200
    assert (lab.router.limits.requests, lab.router.limits.held) == (0, {})


async def test_a_client_that_leaves_waits_no_more(lab: Lab) -> None:
    await lab.ranks[0].kill()
    wire = await lab.raw("POST /v1/x", body=b"{}")
    await until(lambda: lab.router.ranks.waiting == 1, "the request waits")
    wire.close()
    await until(lambda: lab.router.ranks.waiting == 0, "it is forgotten")
    await lab.restart(lab.ranks[0])
    assert (await lab.post("/v1/y")).status_code == 200
    assert [r.target for r in lab.ranks[0].received] == ["/v1/y"]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_ends_the_ranks_work(lab: Lab, begun: bool) -> None:
    async def answer(received: Received) -> None:
        if begun:
            await received.begin()
            await received.chunk(b"data: 1\n\n")
        await never(received)

    rank = lab.ranks[0]
    rank.handler = answer
    wire = await lab.raw("POST /v1/x", body=b"{}")
    if begun:
        await wire.head()
    await until(lambda: rank.received, "the rank has the call")
    wire.close()
    async with asyncio.timeout(LIMIT):
        await rank.left.wait()


async def test_a_client_that_takes_nothing_is_cut_off(start_lab: StartLab) -> None:
    lab = await start_lab("server.client_timeout=1.5")
    sent = 0

    async def answer(received: Received) -> None:
        nonlocal sent
        await received.begin()
        while True:
            await received.chunk(b"x" * 50_000)
            sent += 50_000

    rank = lab.ranks[0]
    rank.handler = answer
    _wire = await lab.raw("POST /v1/x", body=b"{}", receive_buffer=4096)
    async with asyncio.timeout(LIMIT):
        await rank.left.wait()
    assert lab.router.replies.cut == 1
    # What the kernel holds at both connections, and little here.
    assert sent < 20_000_000


async def test_a_slow_client_is_served(lab: Lab) -> None:
    """In small pieces, from small buffers, and it gets every byte."""
    size = 12_000_000

    async def answer(received: Received) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n"
        await received.send(head.encode())
        await received.send(b"x" * size)

    lab.ranks[0].handler = answer
    wire = await lab.raw("POST /v1/x", body=b"{}", receive_buffer=65536)
    await wire.head()
    async with asyncio.timeout(LIMIT * 2):
        for _ in range(size // 30_000):
            assert await wire.reader.readexactly(30_000) == b"x" * 30_000
    assert lab.router.replies.cut == 0


async def test_a_body_that_comes_too_slowly_or_not_at_all_reaches_no_rank(
    start_lab: StartLab,
) -> None:
    lab = await start_lab("server.client_timeout=1")
    for length in (100, 500_000):
        for leaves in (True, False):
            wire = await lab.raw("POST /v1/x", f"Content-Length: {length}")
            await wire.send(b"{")
            if leaves:
                await asyncio.sleep(0)
                wire.close()
            else:
                assert " 400 " in await wire.head()
    assert (await lab.post("/v1/y")).status_code == 200
    assert [r.target for r in lab.ranks[0].received] == ["/v1/y"]


@pytest.mark.parametrize(
    ("sizes", "looks"), [([100], 2), ([100, 90, 80, 80], 4), ([100, 99, 1, 1], 4)]
)
async def test_a_client_is_cut_off_once_it_takes_nothing(sizes: list[int], looks: int) -> None:
    """``sizes``: what waits to be taken, at each look; then the last for good."""
    aborted, left = asyncio.Event(), Mock(side_effect=chain(sizes, repeat(sizes[-1])))
    transport = Mock(get_write_buffer_size=left, abort=aborted.set)
    replies = ClientResponder(timeout=0.01)
    async with asyncio.timeout(LIMIT):
        await replies.drain(Mock(transport=transport), Mock(drain=aborted.wait))
    assert (left.call_count, replies.cut) == (looks, 1)


async def test_a_client_that_has_left_is_not_waited_for() -> None:
    async with asyncio.timeout(LIMIT):
        busy = Mock(drain=asyncio.Event().wait)
        await ClientResponder(timeout=9000).drain(Mock(transport=None), busy)
