"""The pool of connections to ranks: framing, flow control, and what a failure means."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from any_agent.errors import ReplyLost
from router import upstream
from router.upstream import NeverSent, RankResponse, Upstream, end_to_end, open_upstream
from tests.support.errors import fails_with
from tests.support.ports import own_port
from tests.support.proxy import LIMIT
from tests.support.router import END, OK, FakeRank, Received


async def post(client: Upstream, rank: FakeRank) -> int:
    response = await client.send("POST", rank.url, "/v1/x", CIMultiDict(), b"{}")
    async with response:
        await response.read()
    return response.status


def close_behind_the_loops_back(rank: FakeRank) -> None:
    """As a rank that dies: the connection's end has arrived, and no loop has seen it yet."""
    (writer,) = rank._writers
    connection = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@pytest.mark.parametrize("looks", [True, False])
async def test_a_connection_closed_meanwhile_is_not_used(
    looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the look before the write, the same would be a lost reply."""
    if not looks:
        monkeypatch.setattr(upstream, "_has_news", lambda _: False)
    rank = FakeRank()
    await rank.start()
    async with open_upstream() as client:
        assert await post(client, rank) == 200
        close_behind_the_loops_back(rank)
        if looks:
            assert await post(client, rank) == 200
            assert rank.connections == 2
        else:
            with pytest.raises(ReplyLost):
                await post(client, rank)
    await rank.kill()


async def test_a_body_that_streams_is_not_begun_on_a_closed_connection() -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 1000

    rank = FakeRank()
    await rank.start()
    async with open_upstream() as client:
        assert await post(client, rank) == 200
        close_behind_the_loops_back(rank)
        async with await client.send("POST", rank.url, "/v1/x", CIMultiDict(), body()) as answer:
            assert answer.status == 200
    assert rank.received[1].body == b"x" * 3000
    await rank.kill()


async def test_who_closes_every_connection_at_once_is_not_tried_for_ever() -> None:
    accepted = 0

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.transport.abort()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with open_upstream() as client, asyncio.timeout(LIMIT):
        for _ in range(5):
            # Whether the end is there before the request is written is chance.
            with pytest.raises((NeverSent, ReplyLost)):
                await client.send("POST", url, "/", CIMultiDict(), b"{}")
    assert accepted <= 5 * upstream._STALE_TRIES
    server.close()


async def test_where_nobody_listens_nothing_was_sent() -> None:
    async with open_upstream() as client:
        with pytest.raises(NeverSent):
            await client.send("POST", f"http://127.0.0.1:{own_port()}", "/", CIMultiDict(), b"{}")


async def test_a_connection_that_is_not_accepted_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full backlog: the kernel drops what comes then."""
    monkeypatch.setattr(upstream, "_CONNECT_TIMEOUT", 0.3)
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


async def test_informational_answers_are_passed_over() -> None:
    rank = FakeRank()

    async def answer(received: Received) -> None:
        await received.send(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK)

    rank.handler = answer
    await rank.start()
    async with open_upstream() as client:
        async with await client.send("GET", rank.url, "/", CIMultiDict(), None) as response:
            assert (response.status, await response.read()) == (200, b"{}")
        assert "link" not in response.headers
    await rank.kill()


@pytest.mark.parametrize("more", [b"junk", b"HTTP/1.1 404 No\r\nx: y\r\ncontent-length: 0\r\n\r\n"])
async def test_what_follows_an_answer_is_no_part_of_it(more: bytes) -> None:
    rank = FakeRank()

    async def answer(received: Received) -> None:
        await received.send(OK + more)

    rank.handler = answer
    await rank.start()
    async with open_upstream() as client:
        async with await client.send("GET", rank.url, "/", CIMultiDict(), None) as response:
            assert (response.status, response.reason, await response.read()) == (200, "OK", b"{}")
        assert "x" not in response.headers
        async with await client.send("GET", rank.url, "/", CIMultiDict(), None) as again:
            assert again._connection is not response._connection
    await rank.kill()


@pytest.mark.parametrize("head", [b"content-length: 9", b"connection: close", b"x-none: 1"])
async def test_an_answer_that_breaks_off_is_lost_never_short(head: bytes) -> None:
    rank = FakeRank()

    async def answer(received: Received) -> None:
        await received.send(b"HTTP/1.1 200 OK\r\n%b\r\n\r\nhalf" % head)
        received.writer.close()

    rank.handler = answer
    await rank.start()
    async with open_upstream() as client:
        response = await client.send("GET", rank.url, "/", CIMultiDict(), None)
        with pytest.raises(ReplyLost):
            await response.read()
    await rank.kill()


async def test_a_slow_reader_slows_the_rank_down() -> None:
    rank = FakeRank()
    sent = 0

    async def answer(received: Received) -> None:
        nonlocal sent
        await received.begin()
        for _ in range(1000):
            await received.chunk(b"x" * 65_536)
            sent += 1
        await received.send(END)

    rank.handler = answer
    await rank.start()
    async with open_upstream() as client, asyncio.timeout(LIMIT):
        response = await client.send("GET", rank.url, "/", CIMultiDict(), None)
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 500
        assert len(await response.read()) == 1000 * 65_536
    await rank.kill()


async def test_an_answer_may_come_before_the_body_is_sent() -> None:
    going = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        await going.wait()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 No\r\ncontent-length: 0\r\n\r\n")

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with open_upstream() as client, asyncio.timeout(LIMIT):
        async with await client.send("POST", url, "/", CIMultiDict(), body()) as response:
            assert response.status == 413
        # Its connection is in the middle of a request.
        assert not any(client._idle.values())
    server.close()


async def test_a_line_break_in_a_header_is_never_sent() -> None:
    rank = FakeRank()
    await rank.start()
    async with open_upstream() as client:
        for name, value in (("x", "1\r\nx-evil: 1"), ("x\n", "1"), ("x", "1\rx-evil: 1")):
            with fails_with(ValueError, "line break"):
                await client.send("GET", rank.url, "/", CIMultiDict({name: value}), None)
    assert rank.received == []
    await rank.kill()


def test_connections_are_let_go_before_a_proxy_closes_them() -> None:
    """They meet over HTTP only, so each has its own number."""
    source = (Path(__file__).parents[2] / "proxy_ext" / "__main__.py").read_text()
    (seconds,) = re.findall(r"timeout_keep_alive=(\d+)", source)
    assert float(seconds) * 0.9 >= upstream._KEEPALIVE


def test_end_to_end_headers() -> None:
    headers = CIMultiDict(
        [
            ("Connection", "close, X-One"),
            ("connection", " x-two , Content-Length"),
            ("X-One", "1"),
            ("x-Two", "2"),
            ("Content-Length", "3"),
            ("Transfer-Encoding", "chunked"),
            ("X-Kept", "a"),
            ("X-Kept", "b"),
        ]
    )
    kept = end_to_end(CIMultiDictProxy(headers))
    assert list(kept.items()) == [("Content-Length", "3"), ("X-Kept", "a"), ("X-Kept", "b")]
    assert "X-One" in headers, "the original was changed"


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
