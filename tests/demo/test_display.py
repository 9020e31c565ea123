"""The frame on a terminal, rendered for a fixed width."""

from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest
from rich.console import Console, Group, RenderableType

from any_agent.demo.display import Display, frame, news, sparkline, summary
from any_agent.demo.state import DemoState, PartState
from tests.support.demo import AFTER, COMMANDS, REWARDS, busy, fresh, report


def shown(what: RenderableType, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    console.print(what, soft_wrap=True)
    return console.export_text()


def row(text: str, label: str) -> str:
    (found,) = [line for line in text.splitlines() if line.strip("│ ").startswith(f"{label} ")]
    return found.strip("│ ").removeprefix(label).strip()


def test_a_frame_shows_parts_step_reward_version_and_sessions() -> None:
    text = shown(frame(busy(), 80))
    assert "any-agent demo · seed 3 · 1:05" in text
    assert "files in /tmp/demo" in text
    assert text.splitlines()[1].strip("│ ") == "training"
    assert row(text, "engines") == "0 ready   1 ready"
    assert row(text, "ranks") == "0 ready   1 restarting (restarted twice)"
    assert row(text, "router") == "ready"
    assert row(text, "dashboard") == "http://127.0.0.1:41235/ui"
    assert row(text, "step").startswith("12/25 ━")
    assert row(text, "reward") == f"0.600 {sparkline([k / 20 for k in range(1, 13)], 60)}"
    assert row(text, "version") == "12   staleness 0.25   tokens/s 312"
    counts = "open 32   finalized 57   trained 768   rejected 108"
    assert row(text, "sessions") == counts
    assert row(text, "held out") == "first answer right: before 35.8%"
    lost = replace(busy(), sessions={"open": 1, "aborted": 2, "expired": 1})
    counts = "open 1   finalized 0   trained 0   rejected 0   lost 3"
    assert row(shown(frame(lost, 80)), "sessions") == counts


def test_the_held_out_prompts_are_counted_while_they_are_asked() -> None:
    asking = replace(fresh(), asked=17)
    assert row(shown(frame(asking, 80)), "held out").endswith("17/240 asked")
    done = replace(busy(), after=AFTER)
    told = row(shown(frame(done, 80)), "held out")
    assert told == "first answer right: before 35.8%   after 95.8%"


@pytest.mark.parametrize("width", [30, 60, 80, 100, 200])
def test_a_frame_fits_its_terminal_and_keeps_its_height(width: int) -> None:
    heights = set()
    for state in (fresh(), busy(), replace(busy(), url="http://" + "a" * 300)):
        lines = shown(frame(state, width), width).splitlines()
        assert lines.pop() == "", "where the cursor rests"
        assert {len(line) for line in lines} == {min(width, 100)}
        heights.add(len(lines) - bool(state.url))
    assert len(heights) == 1, "a frame that shrinks leaves rests of itself behind"
    assert heights.pop() < 20


def test_a_sparkline_shows_means_within_its_range() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([-1.0, 2.0], 10) == "▁█", "what lies outside is cut off"
    assert sparkline([0.0, 1.0] * 50, 10) == "▅" * 10
    ten = [k / 9 for k in range(10)]
    assert sparkline(ten, 10) == "".join(sparkline([value], 1) for value in ten)
    assert len(sparkline([0.5] * 7, 3)) == 3


def test_long_lines_are_left_to_the_terminal() -> None:
    """A break that we put in would be copied with the command."""
    long = "any-agent serve root=" + "x" * 200
    assert long in shown(Group(*summary(report(), REWARDS, [("Serve it:", [long])])))


def screen(width: int = 80) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=width, color_system=None), file


def test_a_screen_draws_what_it_sees_and_leaves_the_terminal_as_it_was() -> None:
    console, file = screen()
    now = fresh()
    drawn = threading.Event()

    def look() -> object:
        if now.parts[0].state == "ready":
            drawn.set()
        return now

    with Display(look, console, live=True) as shown:  # type: ignore[arg-type]
        now = replace(now, parts=(PartState("engine-0", "ready"),))
        assert drawn.wait(60), "nobody looked again"
        assert "\x1b[?25l" in file.getvalue(), "the cursor is hidden meanwhile"
    shown.end(report(), REWARDS, COMMANDS)
    text = file.getvalue()
    assert "0 waiting" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.rindex("\x1b[2K") < text.index("on prompts that"), "the frame is gone"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_failure_the_last_frame_stays(error: type[BaseException]) -> None:
    console, file = screen()
    with pytest.raises(error), Display(fresh, console, live=True):
        raise error
    left = file.getvalue().rpartition("\x1b[2K")[2]
    assert "making a tiny model" in left
    assert "\x1b[?25h" in left


def test_an_interrupt_of_the_first_frame_leaves_the_cursor() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=40)

    states = [fresh()]

    def interrupted() -> DemoState:
        if not states:
            raise KeyboardInterrupt
        return states.pop()

    with pytest.raises(KeyboardInterrupt), Display(interrupted, console, live=True):
        pass
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


def test_without_a_terminal_a_line_is_printed_when_something_changed() -> None:
    assert news(busy(), replace(busy(), elapsed=70.0, tokens_per_second=1.0)) == []
    url = "http://127.0.0.1:41235"
    assert news(fresh(), replace(fresh(), url=url)) == [f"dashboard {url}/ui"]
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
