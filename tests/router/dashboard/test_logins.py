"""Logins are bounded and end; wrong keys from one address are bounded, too."""

from __future__ import annotations

import pytest

from any_agent.errors import TooManyRequests
from router.dashboard import logins
from router.dashboard.logins import LIFETIME, FailureLimit, Logins
from tests.support.errors import fails_with


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(logins.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_login_ends_by_itself_and_by_hand(clock: Clock) -> None:
    known = Logins()
    first, second = known.begin("k1", "a"), known.begin("k2", "b")
    assert first != second
    found = known.find(first)
    assert found is not None and found.key == "k1"
    known.end(first)
    assert known.find(first) is None and known.find("made up") is None
    clock.now += LIFETIME - 1
    assert known.find(second) is not None
    clock.now += 1
    assert known.find(second) is None and len(known) == 0


def test_a_key_has_so_many_logins_and_pushes_out_its_own(clock: Clock) -> None:
    known = Logins()
    other = known.begin("other", "b")
    own = [known.begin("k", "a") for _ in range(20)]
    assert [known.find(token) is not None for token in own] == [False] * 12 + [True] * 8
    assert known.find(other) is not None


def test_all_logins_are_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "MAX_LOGINS", 5)
    known = Logins()
    tokens = [known.begin("k", f"key {n}") for n in range(9)]
    assert [known.find(token) is not None for token in tokens] == [False] * 4 + [True] * 5


def test_wrong_keys_are_bounded_by_address(clock: Clock) -> None:
    limit = FailureLimit()
    for host in range(5):
        limit.check("192.0.2.1")
        limit.count("192.0.2.1")
        # One network of version 6 is one address.
        limit.count(f"2001:db8::{host}")
    with fails_with(TooManyRequests, retry_after=pytest.approx(60.0)):
        limit.check("192.0.2.1")
    with pytest.raises(TooManyRequests):
        limit.check("2001:db8::ffff")
    for other in ("192.0.2.2", "2001:db8:0:1::1"):
        limit.check(other)
    clock.now += 60
    limit.check("192.0.2.1")


def test_addresses_of_wrong_keys_are_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "MAX_ADDRESSES", 3)
    limit = FailureLimit()
    for host in (1, 2, 3, 4):
        for _ in range(5):
            limit.count(f"192.0.2.{host}")
    limit.check("192.0.2.1")
    for host in (2, 3, 4):
        with pytest.raises(TooManyRequests):
            limit.check(f"192.0.2.{host}")
