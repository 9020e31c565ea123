"""The client of the `/rl` routes against answers, lost answers and nobody at all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from any_agent.client import rl_client
from any_agent.client.rl_client import RLClient
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    InvalidRequest,
    ServiceUnavailable,
    StoreUnavailable,
    TooManyRequests,
    WrongService,
)
from any_agent.protocol.rl import API_HEADER, API_VERSION
from tests.support.errors import fails_with
from tests.support.ports import own_port

STARTED = {
    "session_id": "s",
    "api_key": "k",
    "base_url": "http://x/v1",
    "mode": "train",
    "version": 0,
    "group_id": None,
    "task_id": None,
    "expires_in": 1.0,
}
Answer = httpx.Response | Exception


def client_with(
    *answers: Answer, retry_for: float = 5.0, key: str | Callable[[], str] = "operator"
) -> tuple[RLClient, list[httpx.Request]]:
    """A client whose requests are answered in turn; the last answer stays."""
    seen: list[httpx.Request] = []
    todo = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        item = todo.pop(0) if len(todo) > 1 else todo[0]
        if isinstance(item, Exception):
            raise item
        return item

    http: Any = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    url = "http://service/v1/"
    return RLClient(url, admin_key=key, retry_for=retry_for, http=http), seen


def started(version: str | None = API_VERSION) -> httpx.Response:
    headers = {} if version is None else {API_HEADER: version}
    return httpx.Response(200, json=STARTED, headers=headers)


def refused(status: int, code: str, retry_after: str = "1") -> httpx.Response:
    error = {"error": {"message": f"it says {code}", "code": code}}
    headers = {"Retry-After": retry_after, API_HEADER: API_VERSION}
    return httpx.Response(status, json=error, headers=headers)


def full(retry_after: str = "1") -> httpx.Response:
    return refused(429, "no_capacity", retry_after)


def away() -> httpx.Response:
    return refused(503, "store_unavailable")


def over_quota(retry_after: str) -> httpx.Response:
    return refused(429, "quota_exceeded", retry_after)


async def test_requests_go_to_their_paths_with_their_keys() -> None:
    client, seen = client_with(started())
    session = await client.start_session(task_id="t")
    assert session.api_key == "k"
    assert str(seen[0].url) == "http://service/rl/v1/start_session"
    assert seen[0].headers["authorization"] == "Bearer operator"
    await client.start_session(task_id="t")
    assert len({request.headers["idempotency-key"] for request in seen}) == 2
    reward = {"session_id": "s", "interaction_id": "i", "reward": 1.0, "text_stored": False}
    client, seen = client_with(httpx.Response(200, json=reward))
    await client.set_reward("session-key", 1.0)
    assert seen[0].headers["authorization"] == "Bearer session-key"
    await client.feedback("down", completion_id="i")
    assert seen[1].url.path == "/rl/v1/feedback"
    assert seen[1].headers["authorization"] == "Bearer operator"
    assert json.loads(seen[1].content) == {"completion_id": "i", "thumbs": "down"}
    await client.feedback(text="too long", session_id="s")
    assert json.loads(seen[2].content) == {"session_id": "s", "text": "too long"}
    with fails_with(InvalidRequest, "thumbs"):
        await client.feedback("sideways")  # type: ignore[arg-type]
    with fails_with(InvalidRequest, "text"):
        await client.feedback()


async def test_a_key_that_changes_is_asked_for_at_each_attempt() -> None:
    counts = ("admitted", "limit", "reserved", "waiting", "running", "buffered")
    capacity = dict.fromkeys(counts, 0)
    keys = iter(["first", "second"])
    answers = (httpx.Response(503), httpx.Response(200, json=capacity))
    client, seen = client_with(*answers, key=lambda: next(keys))
    await client.get_capacity()
    assert [r.headers["authorization"] for r in seen] == ["Bearer first", "Bearer second"]


async def test_a_server_that_is_no_service_of_ours_is_told_at_once() -> None:
    error = {"error": {"message": "there is no route /v2/rl/v1/run", "code": "not_found"}}
    below = httpx.Response(404, json=error, headers={API_HEADER: "1"})
    for answer, *said in (
        (started(None), "any-agent serve"),
        (started("2"), "version 2 "),
        (httpx.Response(404, text="Not Found"), "status 404"),
        (httpx.Response(405, json={"detail": "Method Not Allowed"}), "status 405"),
        (httpx.Response(501, text="<html><h1>Error response</h1>"), "status 501"),
        (httpx.Response(403, text="<html>Forbidden</html>"), "status 403"),
        (httpx.Response(307, headers={"Location": "https://login.example"}), "status 307"),
        (below, "/v2/rl/v1/run", "http://host:port"),
    ):
        client, seen = client_with(answer)
        with fails_with(WrongService, *said):
            await client.start_session()
        assert len(seen) == 1
    for body in (b"<html>Welcome</html>", b"{}", b""):
        client, _ = client_with(httpx.Response(200, content=body))
        with fails_with(WrongService, "status 200"):
            await client.run_info()


async def test_a_reward_may_be_a_bool_and_none_is_refused_by_name() -> None:
    client, seen = client_with(
        httpx.Response(200, json={"session_id": "s", "interaction_id": "c", "reward": 1.0})
    )
    await client.set_reward("k", {"correct": True, "short": 0.5})
    assert json.loads(seen[0].content)["reward"] == {"correct": 1.0, "short": 0.5}
    for reward in (client.set_reward, client.set_final_reward):
        with fails_with(InvalidRequest, "None"):
            await reward("k", None)  # type: ignore[arg-type]
    assert len(seen) == 1


async def test_an_error_is_raised_as_its_class_and_once() -> None:
    client, seen = client_with(refused(409, "group_closed"))
    with fails_with(Conflict, "it says group_closed", code="group_closed"):
        await client.start_session(patience=60)
    assert len(seen) == 1


async def test_patience_asks_again_while_there_is_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def no_sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("any_agent.client.backoff.asyncio.sleep", no_sleep)
    client, seen = client_with(full("3"), full("3"), started())
    await client.start_session(patience=60)
    assert len(seen) == 3
    assert all(2.3 < seconds < 3.7 for seconds in slept)
    client, seen = client_with(full())
    with pytest.raises(TooManyRequests):
        await client.start_session()
    assert len(seen) == 1


ONCE = {
    "start_session": lambda c: c.start_session(),
    "set_reward": lambda c: c.set_reward("k", 1.0),
    "feedback": lambda c: c.feedback(0.5, session_id="s"),
    "finalize": lambda c: c.finalize("k", 1.0),
}
"""Calls that must not happen twice."""
LOST = {"connection": httpx.ReadError("lost"), "rank": refused(502, "reply_lost")}


@pytest.mark.parametrize("call", ONCE.values(), ids=ONCE)
@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
async def test_a_request_that_may_have_taken_effect_is_repeated_under_the_same_key(
    call: Callable[[RLClient], object], lost: Answer
) -> None:
    client, seen = client_with(lost, lost, full())
    with pytest.raises(TooManyRequests):
        await call(client)  # type: ignore[misc]
    assert len(seen) == 3
    assert len({request.headers["idempotency-key"] for request in seen}) == 1
    assert len({request.content for request in seen}) == 1


@pytest.mark.parametrize(
    ("call", "repeated"),
    [
        (lambda c: c.lease(owner="o", wait=0), False),
        (lambda c: c.run_info(), True),
        (lambda c: c.set_capacity(limit=1, ttl=1, owner="o", held=[]), True),
        (lambda c: c.ack(owner="o", step=1, trained=[], rejected=[]), True),
    ],
    ids=["lease", "run_info", "set_capacity", "ack"],
)
async def test_a_lost_reply_is_repeated_without_a_key_where_that_changes_nothing(
    call: Callable[[RLClient], object], repeated: bool
) -> None:
    """Nor is a lease after a 503, which may hide that sessions were leased."""
    for lost in (httpx.ReadError("lost"), away()):
        client, seen = client_with(lost, full())
        with pytest.raises(TooManyRequests if repeated else (ServiceUnavailable, StoreUnavailable)):
            await call(client)  # type: ignore[misc]
        assert len(seen) == (2 if repeated else 1)
        assert not any("idempotency-key" in request.headers for request in seen)


async def test_an_address_that_never_answered_is_given_up_soon_and_the_wait_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rl_client, "SILENCE", 0.1)
    never = f"http://127.0.0.1:{own_port()}"
    started_at = time.monotonic()
    async with RLClient(never, retry_for=60, first_contact=0.5) as client:
        waits = [client.request("GET", "/run", repeatable=True) for _ in range(5)]
        failed = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(error) for error in failed] == [ServiceUnavailable] * 5
    assert time.monotonic() - started_at < 10
    (record,) = caplog.records
    assert f"up to 0.5 s for {never}" in record.getMessage()


async def test_a_service_that_has_answered_is_waited_for() -> None:
    client, seen = client_with(started(), *[httpx.ConnectError("away")] * 6, started())
    client.first_contact = 0.01
    await client.start_session()
    await client.start_session()
    assert len(seen) == 8


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("any_agent.client.backoff.time", self)
        monkeypatch.setattr("any_agent.client.backoff.asyncio.sleep", self.sleep)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_a_503_is_asked_again_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[RLClient], Awaitable[object]]] = [
        lambda c: c.run_info(),
        lambda c: c.ack(owner="o", trained=[], rejected=[]),
        lambda c: c.publish_version(version=1, path="p", step=1),
        lambda c: c.resume(),
        *ONCE.values(),
    ]
    for call in calls:
        clock = Clock(monkeypatch)
        client, seen = client_with(away(), retry_for=20.0)
        with fails_with(StoreUnavailable, "it says store_unavailable"):
            await call(client)
        assert len(seen) > 5
        assert 15 < clock.now <= 21
    # What is soon out of date is not repeated for long.
    clock = Clock(monkeypatch)
    client, _ = client_with(away())
    with pytest.raises(StoreUnavailable):
        await client.set_capacity(limit=1, ttl=1, owner="o", held=["s"], retry_for=5)
    assert clock.now <= 5 + 3


async def test_a_quota_is_waited_for_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    leased = httpx.Response(200, content=b"x")
    client, seen = client_with(over_quota("3"), over_quota("4"), leased, retry_for=30)
    # Nothing was done, so also what must not be repeated otherwise is asked for again.
    assert await client.lease(owner="o", wait=0) == b"x"
    assert len(seen) == 3
    assert 7 <= clock.now < 9
    client, seen = client_with(over_quota("40"), retry_for=30)
    with pytest.raises(TooManyRequests) as raised:
        await client.lease(owner="o", wait=0)
    assert (raised.value.code, raised.value.retry_after, len(seen)) == ("quota_exceeded", 40, 1)


async def test_a_run_without_a_place_is_waited_for_with_a_word_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr("any_agent.client.rl_client.time", clock)
    monkeypatch.setattr("any_agent.client.rl_client._told_at", {})
    body = {"error": {"code": "run_queued", "message": "number 2 in the queue"}}
    headers = {"Retry-After": "15", "x-any-agent-run-state": "queued"}
    queued = httpx.Response(503, json=body, headers=headers)
    client, seen = client_with(*[queued] * 40, started(), retry_for=30)
    assert (await client.start_session(task_id="t")).api_key == "k"
    assert len(seen) == 41 and clock.now >= 600
    lines = [r.getMessage() for r in caplog.records if "number 2" in r.getMessage()]
    assert 10 < len(lines) < 25, "a line each half a minute"
    client, _ = client_with(queued, retry_for=30)
    with pytest.raises(AnyAgentError) as raised:
        await client.start_session(task_id="t")
    assert raised.value.code == "run_queued"
    assert clock.now < 8 * 3600


async def test_a_gateways_limit_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limited = httpx.Response(429, text="slow down", headers={"Retry-After": "3"})
    client, seen = client_with(limited, httpx.Response(200, content=b"{}"), retry_for=30)
    await client.request("POST", "/ack", {}, repeatable=True)
    assert len(seen) == 2 and clock.now >= 3
    client, seen = client_with(limited, retry_for=30)
    with pytest.raises(TooManyRequests):
        await client.request("POST", "/ack", {})
    assert len(seen) == 1
