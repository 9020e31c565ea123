"""The demo as lines: what is new, once."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from any_agent.demo.display import Display, news, summary
from tests.support.demo import AFTER, BEFORE, COMMANDS, REWARDS, busy, fresh, report, step


def test_at_first_everything_is_new() -> None:
    assert news(None, fresh()) == [
        "demo      seed 0, files in /tmp/demo",
        "now       making a tiny model",
    ]


def test_nothing_is_told_twice() -> None:
    assert news(busy(), replace(busy(), elapsed=70.0, tokens_per_second=1.0)) == []


def test_steps_and_accuracies_as_they_come() -> None:
    start = replace(fresh(), phase="training", before=BEFORE)
    assert news(fresh(), start) == ["now       training", "before    first answer right: 35.8%"]
    later = start.plus([step(1), step(2, reward=0.625)])
    assert news(start, later) == [
        "step        1/25  reward 0.500  version 1  staleness 0.25  wait 1.00 s  train 0.50 s"
        "  left out 8 (no_variance)  left out 1 (stale)",
        "step        2/25  reward 0.625  version 2  staleness 0.25  wait 1.00 s  train 0.50 s"
        "  left out 8 (no_variance)  left out 1 (stale)",
    ]
    assert news(later, replace(later, after=AFTER)) == ["after     first answer right: 95.8%"]


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


def test_the_summary_is_a_table_and_what_to_type() -> None:
    restarts = {"rank-1": 1, "router": 3}
    found = report(restarts=restarts, failed_sessions=2, errors=["early", "gone"])
    told = summary(found, REWARDS, COMMANDS)
    assert [line.plain for line in told] == [
        "",
        "on prompts that training never sees     before   after",
        "first answer right                       35.8%   95.8%",
        "mean reward (at most 1)                  0.612   0.981",
        "turns per session (at most 2)             1.64    1.04",
        "tokens per answer                         2.10    2.00",
        "",
        "reward    0.500 to 1.000 in 3 steps",
        "curve     /tmp/demo/runs/me/demo/seed-0/reward.png",
        "kept      /tmp/demo/runs/me/demo/seed-0/checkpoints/step-00000025",
        "asked     Say the digit 3, cat.  ->  3",
        "          Give the cat a 5.  ->  6",
        "took      67.8 s, peak memory 2741 MiB in all",
        "restarted rank-1 once, router 3 times",
        "failed    2 of the agents' sessions, at last: gone",
        "",
        "Serve it:",
        "    any-agent serve \\",
        "      --no-train",
    ]


@pytest.mark.parametrize(
    "lines", [news(None, busy()), list(map(str, summary(report(), REWARDS, COMMANDS)))]
)
def test_plain_lines_are_plain(lines: list[str]) -> None:
    assert all(line.isascii() and line.isprintable() for line in lines)
