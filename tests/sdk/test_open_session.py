"""Waiting for a slot: what is said of it, by how many."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any, cast

import pytest

from any_agent.client import backoff
from any_agent.client.rl_client import RLClient
from any_agent.errors import TooManyRequests
from any_agent.sdk import open_session as opening
from any_agent.sdk.find_service import ServiceAddress

SERVICE = ServiceAddress("http://there:8000", None)


class Full:
    """A service without a slot, and time that passes by waiting for one only."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting = 1
        """At the same time."""

    def monotonic(self) -> float:
        return self.now

    async def start_session(self, *, wait: float, **_: Any) -> None:
        self.now += wait / self.waiting
        raise TooManyRequests("none is free: g1 has 2 of 4 sessions", retry_after=1)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Full:
    full = Full()
    monkeypatch.setattr(opening, "time", full)
    monkeypatch.setattr(opening, "_next_notice", -math.inf)
    monkeypatch.setattr(backoff, "time", full)
    monkeypatch.setattr(backoff, "jittered", lambda *_: 0.0)
    return full


async def waits(full: Full, seconds: float) -> None:
    client = cast(RLClient, full)
    with pytest.raises(TooManyRequests):
        await opening.open_session(client, SERVICE, {}, wait=seconds, idempotency_key=None)


async def test_a_short_wait_is_nothing_to_tell(
    full: Full, caplog: pytest.LogCaptureFixture
) -> None:
    await waits(full, 50)
    assert caplog.records == []


async def test_a_long_one_says_what_it_waits_for(
    full: Full, caplog: pytest.LogCaptureFixture
) -> None:
    await waits(full, 100)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "a session has waited 75 s for a slot at http://there:8000: none is free: g1 has 2 of 4 "
        "sessions"
    )


async def test_of_many_that_wait_one_says_it(full: Full, caplog: pytest.LogCaptureFixture) -> None:
    full.waiting = 100
    await asyncio.gather(*(waits(full, 1000) for _ in range(full.waiting)))
    # One a minute. Threads that another test left may log, too.
    said = [record for record in caplog.records if record.name == opening.__name__]
    assert 10 <= len(said) <= 1000 / 60
