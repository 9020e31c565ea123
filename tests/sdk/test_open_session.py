"""Waiting for a slot: what is said of it, by how many."""

from __future__ import annotations

import asyncio
import logging
import math
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

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
    monkeypatch.setattr(opening, "next_notice", -math.inf)
    monkeypatch.setattr(opening, "asks_early", True)
    monkeypatch.setattr(backoff, "time", full)
    monkeypatch.setattr(backoff, "jittered", lambda *_: 0.0)
    return full


async def waits(full: Full, seconds: float) -> None:
    client = cast(RLClient, full)
    with pytest.raises(TooManyRequests):
        await opening.open_session(client, SERVICE, {}, wait=seconds, idempotency_key=None)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what openings logged: threads that another test left may log, too."""
    return [each.getMessage() for each in caplog.records if each.name == opening.__name__]


async def test_the_first_wait_says_within_seconds_what_it_waits_for(
    full: Full, caplog: pytest.LogCaptureFixture
) -> None:
    await waits(full, 50)
    (line,) = said(caplog)
    assert "waited 2 s for a slot at http://there:8000: none is free: g1 has 2 of 4" in line
    assert caplog.records[0].levelno == logging.WARNING
    caplog.clear()
    await waits(full, 50)
    assert said(caplog) == []


async def test_a_callers_key_has_one_body(full: Full, caplog: pytest.LogCaptureFixture) -> None:
    """The service refuses a key that comes with another one."""
    start = AsyncMock(side_effect=full.start_session)
    client = cast(RLClient, SimpleNamespace(start_session=start))
    with pytest.raises(TooManyRequests):
        await opening.open_session(client, SERVICE, {}, wait=90, idempotency_key="mine")
    assert len(start.await_args_list) > 2
    assert all(call == start.await_args for call in start.await_args_list)


async def test_of_many_that_wait_one_says_it(full: Full, caplog: pytest.LogCaptureFixture) -> None:
    full.waiting = 100
    free = cast(RLClient, SimpleNamespace(start_session=AsyncMock()))
    await opening.open_session(free, SERVICE, {}, wait=50, idempotency_key=None)
    await asyncio.gather(*(waits(full, 1000) for _ in range(full.waiting)))
    assert 10 <= len(said(caplog)) <= 1 + 1000 / 60
