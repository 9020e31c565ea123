"""Whether an answer reached its agent, when its session is finalized meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from any_agent.record import unpack_trajectories
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Start

LONG = {"stream": True, "logprobs": True, "max_tokens": 600}
"""Some 200 KB of events: more than what is buffered for a client that reads nothing."""


@contextlib.contextmanager
def deaf_client(proxy: Proxy, key: str, **fields: Any) -> Iterator[None]:
    """Sends a call and reads nothing of its answer."""
    host, port = proxy.url.removeprefix("http://").split(":")
    body = orjson.dumps({"messages": HELLO, **fields})
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((host, int(port)))
        deaf.sendall(head.encode() + body)
        yield


async def test_an_answer_that_is_still_being_sent_is_not_trained_on(start: Start) -> None:
    proxy = await start(send_buffer=4096, admit=5)
    session = await proxy.open()
    read = await proxy.complete(session["api_key"])
    with deaf_client(proxy, session["api_key"], **LONG):

        async def recorded() -> bool:
            return len(await proxy.recorded(session["session_id"])) == 2

        await until(recorded)
        async with asyncio.timeout(60):  # it does not wait for the client
            response = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, session["api_key"])
        assert response.status_code == 200, response.text
        (trajectory,) = await proxy.lease()
    reasons = {i.id: i.untrainable_reason for i in trajectory.interactions}
    assert reasons.pop(read["id"]) is None
    assert list(reasons.values()) == ["undelivered"]
    # So it is in the journal, for whom the trajectory is handed to after a restart.
    stored = await proxy.recorded(session["session_id"])
    assert [i.untrainable_reason for i in stored] == [None, "undelivered"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.service
async def test_an_agent_that_finalizes_at_once_is_trained_on(proxy: Proxy, stream: bool) -> None:
    """The finish reason is the end for it, whatever of the stream comes after."""

    async def one() -> None:
        key = (await proxy.open())["api_key"]
        body = {"messages": HELLO, "max_tokens": 2, "stream": stream}
        headers = {"Authorization": f"Bearer {key}"}
        path = "/v1/chat/completions"
        async with proxy.http.stream("POST", path, json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                if '"finish_reason":"length"' in line:
                    ended = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key)
                    assert ended.status_code == 200, ended.text
                    return
        raise AssertionError("the answer had no end")

    for _ in range(4):
        await asyncio.gather(*(one() for _ in range(25)))
    body = {"owner": "trainer", "wait": 0, "max_groups": 100}
    leased = unpack_trajectories((await proxy.http.post("/rl/v1/lease", json=body)).content)
    assert len(leased) == 100
    assert [i.untrainable_reason for t in leased for i in t.interactions] == [None] * 100
