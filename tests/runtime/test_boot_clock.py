"""The clock that cannot be set."""

from __future__ import annotations

import time

import pytest

from any_agent.runtime.boot_clock import boot_seconds, clock_stamp, seconds_since


def test_time_in_which_the_machine_is_suspended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = time.clock_gettime
    stamp, wall, before = clock_stamp(), time.time(), boot_seconds()
    suspended = {time.CLOCK_BOOTTIME: 7200.0}
    monkeypatch.setattr(time, "clock_gettime", lambda clock: boot(clock) + suspended[clock])
    monkeypatch.setattr(time, "time", lambda: wall - 10**6)
    assert 7200 <= boot_seconds() - before < 7200 + 600
    assert 7199 <= seconds_since(stamp, wall) < 7200 + 600


def test_a_platform_without_it_has_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    assert boot_seconds() == 5.0
