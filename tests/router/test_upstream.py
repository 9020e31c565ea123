"""The pool of connections to ranks: framing, flow control, and what a failure means."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from any_agent.errors import ReplyLost
from router import upstream
from router.upstream import NeverSent, RankResponse, Upstream, open_upstream
from tests.support.errors import fails_with
from tests.support.ports import own_port
from tests.support.router import OK, FakeRank, Received, sends


@pytest.fixture
async def rank() -> AsyncIterator[FakeRank]:
    rank = FakeRank()
    await rank.start()
    yield rank
    await rank.kill()


async def post(client: Upstream, rank: FakeRank) -> int:
    response = await client.send("POST", rank.url, "/v1/x", CIMultiDict(), b"{}")
    async with response:
        await response.read()
    return response.status


def close_behind_the_loops_back(received: Received) -> None:
    """As a rank that dies: the connection's end has arrived, and no loop has seen it yet."""
    descriptor = received.writer.get_extra_info("socket").fileno()
    connection = socket.socket(fileno=os.dup(descriptor))
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()


async def test_a_connection_closed_meanwhile_is_not_used(rank: FakeRank) -> None:
    """Neither for a body at hand nor for one that streams."""

    async def body() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 1000

    async with open_upstream() as client:
        assert await post(client, rank) == 200
        close_behind_the_loops_back(rank.received[0])
        assert await post(client, rank) == 200
        assert rank.connections == 2
        close_behind_the_loops_back(rank.received[1])
        async with await client.send("POST", rank.url, "/v1/x", CIMultiDict(), body()) as answer:
            assert answer.status == 200
    assert rank.received[2].body == b"x" * 3000


async def test_a_refused_connection_is_known_as_nothing_sent() -> None:
    async with open_upstream() as client:
        with pytest.raises(NeverSent):
            await client.send("POST", f"http://127.0.0.1:{own_port()}", "/", CIMultiDict(), b"{}")


async def test_a_connection_that_is_not_accepted_in_time_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full backlog: the kernel drops what comes then."""
    monkeypatch.setattr(upstream, "CONNECT_TIMEOUT", 0.3)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        async with open_upstream() as client, asyncio.timeout(60):
            with pytest.raises(NeverSent):
                url = f"http://127.0.0.1:{full.getsockname()[1]}"
                await client.send("POST", url, "/", CIMultiDict(), b"{}")
        for one in waiting:
            one.close()


async def test_informational_answers_are_passed_over(rank: FakeRank) -> None:
    rank.handler = sends(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK)
    async with open_upstream() as client:
        async with await client.send("GET", rank.url, "/", CIMultiDict(), None) as response:
            assert (response.status, await response.read()) == (200, b"{}")
        assert "link" not in response.headers


@pytest.mark.parametrize("more", [b"junk", b"HTTP/1.1 404 No\r\nx: y\r\ncontent-length: 0\r\n\r\n"])
async def test_bytes_behind_an_answer_are_no_part_of_it(rank: FakeRank, more: bytes) -> None:
    rank.handler = sends(OK + more)
    async with open_upstream() as client:
        async with await client.send("GET", rank.url, "/", CIMultiDict(), None) as response:
            assert (response.status, response.reason, await response.read()) == (200, "OK", b"{}")
        assert "x" not in response.headers
        async with await client.send("GET", rank.url, "/", CIMultiDict(), None):
            assert rank.connections == 2


@pytest.mark.parametrize("head", [b"content-length: 9", b"connection: close", b"x-none: 1"])
async def test_an_answer_that_breaks_off_is_lost_never_short(rank: FakeRank, head: bytes) -> None:

    async def answer(received: Received) -> None:
        await received.send(b"HTTP/1.1 200 OK\r\n%b\r\n\r\nhalf" % head)
        received.writer.close()

    rank.handler = answer
    async with open_upstream() as client:
        response = await client.send("GET", rank.url, "/", CIMultiDict(), None)
        with pytest.raises(ReplyLost):
            await response.read()


async def test_a_line_break_in_a_header_is_never_sent(rank: FakeRank) -> None:
    async with open_upstream() as client:
        for name, value in (("x", "1\r\nx-evil: 1"), ("x\n", "1"), ("x", "1\rx-evil: 1")):
            with fails_with(ValueError, "line break"):
                await client.send("GET", rank.url, "/", CIMultiDict({name: value}), None)
    assert rank.received == []


@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=4), st.none()), max_size=30),
    st.integers(0, 2**30),
)
async def test_parts_stay_in_their_order_whoever_takes_them(
    steps: list[bytes | None], seed: int
) -> None:
    """A reader that pushes what it can, whose client is now and then busy; None: it may run."""
    random, got = Random(seed), list[bytes]()
    response = RankResponse(cast(Any, None), cast(Any, None))

    def push(part: bytes) -> bool:
        if random.random() < 0.5:
            return False
        got.append(part)
        return True

    async def read() -> None:
        while part := await response.readany(push):
            got.append(part)

    reader = asyncio.create_task(read())
    for step in steps:
        if step is None:
            await asyncio.sleep(0)
        else:
            response.add(step)
    response.end()
    await reader
    assert b"".join(got) == b"".join(step for step in steps if step)
