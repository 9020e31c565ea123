"""The demo as lines: what is new, once."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from any_agent.demo.display import Display, news, summary
from tests.support.demo import COMMANDS, REWARDS, busy, fresh, report


def test_nothing_is_told_twice() -> None:
    assert news(busy(), replace(busy(), elapsed=70.0, tokens_per_second=1.0)) == []


def test_lines_are_printed_when_something_changed() -> None:
    out = io.StringIO()
    state = fresh()
    with Display(lambda: state, Console(file=out), live=False) as shown:
        shown.say("engine 0  ready")
        shown.update()
        state = replace(state, phase="training")
        shown.update()
        shown.end(report(), REWARDS, COMMANDS)
    lines = out.getvalue().splitlines()
    assert lines[2:4] == ["engine 0  ready", "now       training"]
    assert lines[-1] == "      --no-train"


def test_the_summary_tells_of_failures_and_restarts() -> None:
    restarts = {"rank-1": 1, "router": 3}
    found = report(restarts=restarts, failed_sessions=2, errors=["early", "gone"])
    told = [line.plain for line in summary(found, REWARDS, COMMANDS)]
    assert all(line.isascii() and line.isprintable() for line in told)
    assert "first answer right                       35.8%   95.8%" in told
    assert "restarted rank-1 once, router 3 times" in told
    assert "failed    2 of the agents' sessions, at last: gone" in told
