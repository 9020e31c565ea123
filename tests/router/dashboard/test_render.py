"""Times as people read them."""

from __future__ import annotations

import time

import pytest

from router.dashboard import render


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "–"), (0.0, "0 ms"), (0.028, "28 ms"), (1.25, "1.2 s"), (59.0, "59 s")),
        *((90.0, "1.5 min"), (5400.0, "1.5 h"), (129_600.0, "1.5 d")),
    ],
)
def test_a_length_of_time_is_shown_in_the_unit_that_fits(seconds: float | None, text: str) -> None:
    assert render.span(seconds) == text


@pytest.mark.parametrize(
    ("at", "text"), [(None, "–"), (97, "3.0 s ago"), (100.5, "just now"), (3700, "in 1.0 h")]
)
def test_a_moment_by_another_clock_may_lie_ahead(
    at: float | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert render.ago(at) == text
