from __future__ import annotations

import io

import pytest

from any_agent.sdk.results import RunProgress
from any_agent.sdk.runner import ProgressBar, progress_callback


def test_a_bar_is_one_line_that_is_drawn_over() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream)
    state = RunProgress(total=4)
    bar(state)
    state.done, state.running, state.rewarded, state.rewards = 4, 2, 3, 1.5
    state.failed = 1
    bar(state)
    bar.end()
    bar.end()
    first, second, third = stream.getvalue().split("\r")
    assert first == ""
    assert second.startswith("." * 24 + " 0/4 runs | 0 running | ")
    assert third.startswith("#" * 24 + " 4/4 runs | 2 running | ")
    assert third.endswith("/s | 1 failed | mean reward 0.500\n")


def test_it_is_drawn_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stream = io.StringIO()
    bar = ProgressBar(stream)
    state = RunProgress(total=1000)
    for done in range(100):
        state.done, now = done, done * 0.01
        bar(state)
    assert stream.getvalue().count("\r") == 5


def test_who_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunProgress] = []
    state = RunProgress(total=1)
    progress_callback(told.append)(state)
    assert told == [state]
    assert isinstance(progress_callback(True), ProgressBar)
    progress_callback(False)(state)
    for terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        assert isinstance(progress_callback(None), ProgressBar) is terminal
