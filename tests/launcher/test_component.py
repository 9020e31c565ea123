"""Parts: readiness, restarts with growing delays, and when they are given up.

The processes and the clock are the test's.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from signal import SIGKILL, SIGSEGV, SIGTERM
from typing import Any, cast

import pytest

from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.component import Component, describe_exit
from any_agent.launcher.process import SupervisedProcess
from tests.support.errors import fails_with
from tests.support.launcher.children import until


class FakeProcess:
    """Runs until the test, or its part, gives it an exit code."""

    def __init__(self, pid: int) -> None:
        self.name = "part-0"
        self.pid = pid
        self.log = Path("part-0.log")
        self.code: int | None = None

    @property
    def running(self) -> bool:
        return self.code is None

    def start(self) -> None:
        pass

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -SIGKILL

    def terminate(self) -> None:
        self.code = -SIGTERM

    def stop(self, *, grace: float) -> None:
        self.code = -SIGTERM if self.code is None else self.code

    def last_lines(self) -> str:
        return "    last words"


class Lab:
    """Parts, their processes, a clock that the test moves, and what they said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.processes: list[FakeProcess] = []

    def part(self, **options: Any) -> Component:
        """One that is started."""

        def make() -> SupervisedProcess:
            self.processes.append(FakeProcess(len(self.processes)))
            return cast(SupervisedProcess, self.processes[-1])

        options = {"ready": lambda _: True} | options
        part = Component("part-0", make, say=self.said.append, clock=lambda: self.now, **options)
        part.start()
        return part

    def until_ready(self, part: Component) -> None:
        def ready() -> bool:
            part.check()
            return part.state == "ready"

        until(ready)

    def ready_part(self, **options: Any) -> Component:
        part = self.part(**options)
        self.until_ready(part)
        return part

    def die(self, part: Component, code: int = -SIGKILL) -> None:
        """Have it die, and the part notice."""
        self.processes[part.pid].code = code
        part.check()

    def again(self, part: Component, seconds: float = 5) -> None:
        """Let the longest delay pass, and have it ready."""
        self.now += seconds
        self.until_ready(part)


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_a_part_that_dies_is_started_again_after_growing_delays(lab: Lab) -> None:
    part = lab.part(where=" at http://x")
    assert (part.state, part.restarts) == ("starting", 0)
    lab.until_ready(part)
    for count, delay in enumerate((0.2, 0.4, 0.8, 1.6, 3.2)):
        lab.die(part)
        lab.now += delay - 0.01
        part.check()
        assert (part.state, part.pid) == ("restarting", count), f"it came back before {delay} s"
        lab.now += 0.011
        lab.until_ready(part)
        assert (part.pid, part.restarts) == (count + 1, count + 1)
    again = ["part 0    ended by SIGKILL; starting it again", "part 0    ready again"]
    assert lab.said == ["part 0    ready at http://x", *again * 5]


HUNG = 0
FOR_EVER = 60


@pytest.mark.parametrize(
    ("code", "seconds", "options", "survived"),
    [
        pytest.param(-SIGKILL, 5, {}, 5, id="killed often"),
        pytest.param(-SIGKILL, 13, {}, 40, id="killed now and then"),
        pytest.param(-SIGKILL, 60, {}, FOR_EVER, id="killed seldom"),
        pytest.param(1, 13, {}, 20, id="fails now and then"),
        pytest.param(HUNG, 13, {}, 20, id="hangs now and then"),
        pytest.param(1, 30, {}, FOR_EVER, id="fails seldom"),
        pytest.param(1, 120, {"progress": lambda: 0}, 5, id="fails before each step"),
        pytest.param(-SIGSEGV, 120, {"progress": lambda: 0}, 5, id="crashes before each step"),
        # As the system does with a trainer whose step needs more memory than there is.
        pytest.param(-SIGKILL, 600, {"progress": lambda: 0}, 40, id="killed before each step"),
    ],
)
def test_a_part_that_dies_too_often_is_given_up(
    lab: Lab, code: int, seconds: float, options: dict[str, Any], survived: int
) -> None:
    part = lab.ready_part(**options)

    def lives(count: int) -> None:
        for _ in range(count):
            if code == HUNG:
                part.kill("hangs")
                part.check()
            else:
                lab.die(part, code)
            lab.again(part, seconds)

    lives(survived)
    assert part.restarts == survived
    if survived != FOR_EVER:
        with fails_with(StartupError, "part 0 ", f" {survived + 1} times", "last words"):
            lives(1)


def test_only_consecutive_lives_that_come_to_nothing_are_counted(lab: Lab) -> None:
    steps = [0]
    part = lab.ready_part(progress=lambda: steps[0])
    for life in range(10):
        steps[0] += life == 4
        lab.die(part, 1)
        lab.again(part, 120)
    with fails_with(StartupError, " 6 times"):
        lab.die(part, 1)


def test_slow_deaths_before_it_is_ready_are_counted_too(lab: Lab) -> None:
    """Else a part that needs a while to fail would be started for ever."""
    part = lab.ready_part(ready=lambda process: process.pid == 0)
    lab.die(part)
    with fails_with(StartupError, " 6 times", "code 1", "last words"):
        for count in range(1, 10):
            lab.now += 120
            until(lambda count=count: (part.check(), part.pid == count)[1])
            lab.die(part, 1)
    assert part.restarts == 6


def test_a_part_that_is_relocated_is_judged_anew(lab: Lab) -> None:
    moved: list[str] = []

    def relocate() -> bool:
        moved.append(part.state)
        part.forget_deaths()
        return len(moved) < 2

    part = lab.ready_part(relocate=relocate)
    for _ in range(6):
        lab.die(part)
        lab.again(part)
    assert moved == ["ready"]
    with fails_with(StartupError, "part 0 ", " 6 times"):
        for _ in range(6):
            lab.die(part)
            lab.again(part)


def test_a_part_that_is_killed_at_its_first_start_is_started_again(lab: Lab) -> None:
    part = lab.part(ready=lambda process: process.pid == 1)
    lab.die(part)
    lab.again(part)
    assert (part.pid, part.restarts) == (1, 1)


def test_a_part_is_said_to_be_ready_once_it_has_opened(lab: Lab) -> None:
    opened = False
    part = lab.ready_part(opened=lambda: opened)
    part.check()
    assert lab.said == []
    opened = True
    part.check()
    part.check()
    assert lab.said == ["part 0    ready"]


def test_a_start_that_fails_is_not_repeated(lab: Lab) -> None:
    for code in (0, 1, 3):
        part = lab.part(ready=lambda _: False)
        with fails_with(StartupError, "part 0 ", f"code {code}", "last words"):
            lab.die(part, code)
    # A configuration that is refused is not tried again in a later life either.
    with fails_with(ConfigError, "part 0 ", "last words"):
        lab.die(lab.part(), 2)
    part = lab.ready_part()
    with fails_with(ConfigError, "part 0 ", "last words"):
        lab.die(part, 2)


def test_a_part_that_does_not_get_ready_in_time_ends_the_start(lab: Lab) -> None:
    full = False
    part = lab.part(ready=lambda _: False, timeout=60, starved=lambda: full)
    lab.now = 59.9
    part.check()
    full = True
    for _ in range(10):
        lab.now += 61
        part.check()
    assert part.state == "starting", "on a full disk it gets more time"
    full = False
    lab.now += 120
    with fails_with(StartupError, "part 0 ", "60 s", "last words"):
        part.check()


def test_a_question_that_fails_is_asked_again(lab: Lab) -> None:
    answers = iter([RuntimeError("planted"), RuntimeError("planted"), True])

    def ready(_: object) -> object:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    lab.ready_part(ready=ready)


@pytest.mark.parametrize("seen", [False, True])
def test_a_part_that_has_done_its_work_is_not_started_again(lab: Lab, seen: bool) -> None:
    part = lab.part(ready=lambda _: seen, finishes=True)
    if seen:
        lab.until_ready(part)
    lab.die(part, 0)
    lab.now += 100
    part.check()
    assert (part.finished, part.state, part.restarts) == (True, "ended", 0)


def test_work_that_fails_is_begun_again(lab: Lab) -> None:
    part = lab.ready_part(finishes=True)
    lab.die(part, 1)
    lab.again(part)
    assert "log: part-0.log" in lab.said[1], "it tells why"
    lab.die(part, 0)
    assert part.finished


def test_a_slow_answer_delays_nobody(lab: Lab) -> None:
    """The caller of `check` has other parts to look after, and perhaps an event loop."""
    asked: list[threading.Thread] = []
    answer = threading.Event()

    def slow(_: object) -> bool:
        asked.append(threading.current_thread())
        return answer.wait(60)

    part = lab.part(ready=slow)
    until(lambda: asked)
    part.check()
    assert part.state == "starting"
    answer.set()
    lab.until_ready(part)
    assert len(asked) == 1 and asked[0] is not threading.current_thread()


def test_a_process_that_is_slow_to_make_delays_nobody(lab: Lab) -> None:
    """The launcher reads an engine's weights before it starts one again."""
    first, second = lab.ready_part(), lab.ready_part()
    make, read = first.make, threading.Event()
    makers: list[threading.Thread] = []

    def slow() -> SupervisedProcess:
        makers.append(threading.current_thread())
        assert read.wait(60)
        return make()

    first.make = slow
    lab.die(first)
    lab.die(second)
    lab.now += 5
    first.check()
    lab.again(second)
    assert first.state == "restarting"
    read.set()
    lab.until_ready(first)
    assert len(makers) == 1 and makers[0] is not threading.current_thread()


def test_a_process_that_is_never_made_is_given_up(lab: Lab) -> None:
    part = lab.ready_part(timeout=300.0)
    read = threading.Event()
    part.make = lambda: read.wait(60) and None  # type: ignore[assignment, return-value]
    lab.die(part)
    lab.now += 5
    part.check()
    lab.now += 301
    with fails_with(StartupError, "part 0 ", "within 300 s"):
        part.check()
    read.set()


NO_MEMORY = OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize(
    "error", [NO_MEMORY, subprocess.SubprocessError("Exception occurred in preexec_fn.")]
)
def test_a_restart_that_is_impossible_for_a_while_is_tried_again(
    lab: Lab, error: Exception
) -> None:
    def never() -> SupervisedProcess:
        raise error

    with fails_with(StartupError, "part 0 ", error):
        Component("part-0", never, say=print, ready=lambda _: True).start()
    part = lab.ready_part()
    make, part.make = part.make, never
    lab.die(part)
    lab.now += 5
    until(lambda: (part.check(), part.restarts == 2)[1])
    part.make = make
    lab.again(part)


@pytest.mark.parametrize("waits", [False, True])
def test_a_stopped_part_is_not_started_again(lab: Lab, waits: bool) -> None:
    """Also one that waits for its restart."""
    part = lab.ready_part()
    if waits:
        lab.die(part)
    part.terminate()
    part.stop(grace=5)
    lab.now += 100
    part.check()
    assert (part.state, part.finished, len(lab.processes)) == ("ended", False, 1)
    assert part.exit_code == -SIGTERM


def test_an_exit_of_a_part_is_told_in_words() -> None:
    told = [describe_exit(code) for code in (143, -9, -44)]
    assert told == ["ended with code 143", "ended by SIGKILL", "ended by signal 44"]


def test_deaths_on_a_full_disk_cost_no_attempts(lab: Lab) -> None:
    full = True
    part = lab.ready_part(starved=lambda: full)
    for count in range(1, 10):
        full = True
        lab.die(part, 1)
        for _ in range(20):
            lab.now += 6
            part.check()
        assert (part.state, part.restarts) == ("restarting", count)
        full = False
        lab.again(part)
    # What is killed needs perhaps no space, as an engine, and starts again on the full disk.
    full = True
    lab.die(part)
    lab.again(part)
    part.kill("has not answered for 30 s")
    part.check()
    lab.again(part)
