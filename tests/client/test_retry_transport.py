"""The client that agents are given: what it waits for, and what it hands on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

import httpx
import pytest
from openai import AsyncOpenAI

from any_agent.client.backoff import jittered
from any_agent.client.retry_transport import RetryTransport
from any_agent.workflow import context

KEY = {"Authorization": "Bearer sk-v1.0.abc.def"}
Answer = httpx.Response | Exception


class Scripted(httpx.AsyncBaseTransport):
    """Answers one after the other; the last one for good."""

    def __init__(self, *answers: Callable[[], Answer]) -> None:
        self.answers = list(answers)
        self.seen: list[httpx.Request] = []
        self.bodies: list[bytes] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(httpx.Request(request.method, request.url, headers=request.headers))
        self.bodies.append(await request.aread())
        make = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        answer = make()
        if isinstance(answer, Exception):
            raise answer
        return answer


def full(after: str = "0") -> httpx.Response:
    return httpx.Response(429, headers={"Retry-After": after})


def fine() -> httpx.Response:
    return httpx.Response(200, json={"id": "x"})


async def post(
    script: Scripted, headers: Mapping[str, str | bytes] = KEY, patience: float = 20.0
) -> httpx.Response:
    transport = RetryTransport(script, patience=patience)
    async with httpx.AsyncClient(transport=transport) as client:
        return await client.post(
            "http://service/v1/x", json={"a": 1}, headers=httpx.Headers([*headers.items()])
        )


async def test_a_run_that_has_no_place_yet_is_waited_for_beyond_the_patience() -> None:
    queued = {"Retry-After": "1", "x-any-agent-run-state": "queued"}
    script = Scripted(*[lambda: httpx.Response(503, headers=queued)] * 2, fine)
    assert (await post(script, patience=0.5)).status_code == 200
    assert len(script.seen) == 3
    script = Scripted(lambda: httpx.Response(503, headers={"Retry-After": "1"}), fine)
    assert (await post(script, patience=0.5)).status_code == 503


async def test_a_service_that_is_full_or_paused_is_waited_for() -> None:
    script = Scripted(full, lambda: httpx.Response(503), fine)
    assert (await post(script)).status_code == 200
    assert script.bodies == [b'{"a":1}'] * 3
    counts = [request.headers.get("x-stainless-retry-count", "0") for request in script.seen]
    assert counts == ["0", "1", "2"], "so the service knows them for the same call"
    # As Anthropic's and Azure's clients say the key.
    for header in ("x-api-key", "api-key"):
        assert (await post(Scripted(full, fine), {header: "sk-v1.0.a.b"})).status_code == 200


async def test_a_reply_that_was_lost_is_asked_for_again() -> None:
    lost = httpx.Response(502, headers={"x-should-retry": "true"})
    script = Scripted(lambda: httpx.ReadError("gone"), lambda: lost, fine)
    headers = {**KEY, "x-stainless-retry-count": "1"}
    assert (await post(script, headers)).status_code == 200
    assert [r.headers["x-stainless-retry-count"] for r in script.seen] == ["1", "2", "3"]
    # A count that is none begins at 0.
    script = Scripted(full, fine)
    odd = {**KEY, "x-stainless-retry-count": b"\xb2"}
    assert (await post(script, odd)).status_code == 200
    assert script.seen[1].headers["x-stainless-retry-count"] == "1"


async def test_an_error_that_no_waiting_mends_is_returned_at_once() -> None:
    for answer in (
        httpx.Response(400),
        httpx.Response(410),
        httpx.Response(502),
        httpx.Response(507, headers={"Retry-After": "0"}),
        httpx.Response(429, headers={"x-should-retry": "false"}),
    ):
        script = Scripted(lambda answer=answer: answer)
        assert (await post(script)).status_code == answer.status_code
        assert len(script.seen) == 1
    # The agent's own limit holds.
    with pytest.raises(httpx.ReadTimeout):
        await post(Scripted(lambda: httpx.ReadTimeout("slow"), fine))


async def test_requests_to_other_servers_are_not_repeated() -> None:
    for headers in ({}, {"Authorization": "Bearer sk-proj-1"}):
        script = Scripted(full, fine)
        assert (await post(script, headers)).status_code == 429
    with pytest.raises(httpx.ConnectError):
        await post(Scripted(lambda: httpx.ConnectError("no")), {})


async def test_the_patience_of_the_transport_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(seconds: float) -> None:
        raise AssertionError(f"it waits {seconds:g} s: a wait that is too long is not begun")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "sleep", never)
        assert (await post(Scripted(lambda: full("30")), patience=5)).status_code == 429
    with pytest.raises(httpx.ConnectError):
        await post(Scripted(lambda: httpx.ConnectError("no")), patience=0.15)


async def test_a_cancelled_request_stops_waiting() -> None:
    task = asyncio.create_task(post(Scripted(lambda: full("10"))))
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    task.cancel()
    await asyncio.wait([task], timeout=1)
    assert task.cancelled()


async def test_an_agent_cannot_close_what_others_use() -> None:
    client = await context.get_httpx_client()
    async with AsyncOpenAI(api_key="x", base_url="http://service", http_client=client):
        pass
    await client.aclose()
    async with client:
        assert not client.is_closed
    assert not client.is_closed
    await context.close_clients()
    assert client.is_closed


def test_waits_between_attempts_are_spread_within_their_bounds() -> None:
    waits = {jittered(2.0, 0.5, 1.5) for _ in range(100)}
    assert len(waits) > 50 and all(1.0 <= wait <= 3.0 for wait in waits)


def test_the_global_random_generator_is_left_alone() -> None:
    """It is in checkpoints: a refused request must not change what a resumed run draws."""
    before = random.getstate()
    jittered(1.0)
    assert random.getstate() == before
