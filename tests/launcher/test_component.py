"""Parts: readiness, restarts with growing delays, and when they are given up.

The children are real; the clock of the restart policy is the test's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from any_agent.errors import ConfigError, StartupError
from any_agent.launcher import component
from any_agent.launcher.component import Component, describe_exit
from any_agent.launcher.process import Command, SupervisedProcess
from tests.support.errors import fails_with
from tests.support.launcher.children import until

pytestmark = pytest.mark.service

SERVES = "import os, signal\nprint(f'serves as {os.getpid()}', flush=True)\nsignal.pause()"
FAILS = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit({code}))
print(f"serves as {{os.getpid()}}", flush=True)
signal.pause()
"""
SAYS = "import sys\nprint('first')\nprint('last words')\nsys.exit({code})"


class Lab:
    """Parts of one module each, a clock that the test moves, and what they said."""

    def __init__(self, module: Callable[[str, str], str], folder: Path) -> None:
        self._module = module
        self._folder = folder
        self.now = 0.0
        self.said: list[str] = []
        self.parts: list[Component] = []
        self.processes: list[SupervisedProcess] = []

    def part(self, source: str, name: str = "part-0", **options: Any) -> Component:
        module = self._module(name.replace("-", "_"), source)
        log = self._folder / f"{name}.log"

        def make() -> SupervisedProcess:
            process = SupervisedProcess(name, Command([module]), log)
            self.processes.append(process)
            return process

        part = Component(name, make, say=self.said.append, clock=lambda: self.now, **options)
        self.parts.append(part)
        return part

    def write(self, part: Component, source: str) -> None:
        """Set what the part runs from its next start on.

        Of another length than before: Python would take a source of the same second and length for
        the one that it has compiled.
        """
        self._module(part.name.replace("-", "_"), source + "\n" * len(self.processes))

    def until_ready(self, part: Component) -> None:
        def ready() -> bool:
            part.check()
            return part.state == "ready"

        until(ready)

    def until_ended(self, part: Component) -> None:
        def ended() -> bool:
            part.check()
            return part.state == "ended"

        until(ended)

    def die(self, part: Component, number: signal.Signals = signal.SIGKILL) -> None:
        """Have it die, and the part notice."""
        os.kill(part.pid, number)
        self.until_noticed(part)

    def until_noticed(self, part: Component) -> None:
        """Until the part has noticed one more death; raises what it makes of it."""
        count = part.restarts

        def noticed() -> bool:
            part.check()
            return part.restarts > count or part.state == "ended"

        until(noticed)

    def again(self, part: Component) -> None:
        """Let the longest delay pass, and have it ready."""
        self.now += 5
        self.until_ready(part)


@pytest.fixture
def lab(module: Callable[[str, str], str], tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(module, tmp_path)
    yield lab
    for part in lab.parts:
        part.stop(grace=1)


def serves(process: SupervisedProcess) -> bool:
    """Whether just this process has told its log that it serves."""
    return f"serves as {process.pid}\n" in process.log.read_text()


def test_a_part_gets_ready_and_is_started_again(lab: Lab) -> None:
    part = lab.part(SERVES, ready=serves, where=" at http://x")
    part.start()
    assert (part.state, part.restarts) == ("starting", 0)
    lab.until_ready(part)
    first = part.pid
    lab.die(part)
    assert (part.state, part.restarts) == ("restarting", 1)
    lab.again(part)
    assert part.pid != first
    assert lab.said == [
        "part 0    ready at http://x",
        "part 0    ended by SIGKILL; starting it again",
        "part 0    ready again",
    ]


def test_a_part_that_is_relocated_is_judged_anew(lab: Lab) -> None:
    moved: list[str] = []

    def relocate() -> bool:
        moved.append(part.state)
        part.forget_deaths()
        return len(moved) < 2

    part = lab.part(SERVES, ready=serves, relocate=relocate)
    part.start()
    lab.until_ready(part)
    for _ in range(6):
        lab.die(part)
        lab.again(part)
    assert moved == ["ready"]
    with fails_with(StartupError, "part 0 ", " 6 times"):
        for _ in range(6):
            lab.die(part)
            lab.again(part)


def test_each_start_has_its_own_arguments(lab: Lab, tmp_path: Path) -> None:
    versions = iter(["v1", "v2"])
    (tmp_path / "tell.py").write_text("import sys\nprint(sys.argv[1:], flush=True)\n" + SERVES)
    log = tmp_path / "log"
    part = Component(
        "engine-0",
        lambda: SupervisedProcess("engine-0", Command(["tell", next(versions)]), log),
        say=lab.said.append,
        clock=lambda: lab.now,
        ready=serves,
    )
    lab.parts.append(part)
    part.start()
    lab.until_ready(part)
    lab.die(part)
    lab.again(part)
    assert [line for line in log.read_text().splitlines() if line[0] == "["] == ["['v1']", "['v2']"]


def test_the_delay_before_a_restart_grows(lab: Lab) -> None:
    part = lab.part(SERVES, ready=serves)
    part.start()
    lab.until_ready(part)
    for delay in (0.2, 0.4, 0.8, 1.6, 3.2):
        pid = part.pid
        lab.die(part)
        lab.now += delay - 0.01
        part.check()
        assert (part.state, part.pid) == ("restarting", pid), f"it came back before {delay} s"
        lab.now += 0.011
        part.check()
        assert part.pid != pid, f"it was not started after {delay} s"
        lab.until_ready(part)


def test_one_death_too_many_ends_it_with_the_end_of_its_log(lab: Lab) -> None:
    part = lab.part(SERVES, ready=serves)
    part.start()
    lab.until_ready(part)
    for _ in range(component._MAX_RESTARTS):
        lab.die(part)
        lab.again(part)
    with pytest.raises(StartupError) as raised:
        lab.die(part)
    message = raised.value.message
    assert message.startswith("part 0 ended 6 times (ended by SIGKILL at last):\n")
    assert f"    serves as {part.pid}\n  log: " in message
    assert part.restarts == component._MAX_RESTARTS


def test_deaths_of_long_ago_are_forgotten(lab: Lab) -> None:
    part = lab.part(SERVES, ready=serves)
    part.start()
    lab.until_ready(part)
    for _ in range(2 * component._MAX_RESTARTS):
        lab.die(part)
        lab.again(part)
        lab.now += component._WINDOW / component._MAX_RESTARTS
    assert part.restarts == 2 * component._MAX_RESTARTS


def test_slow_deaths_before_it_is_ready_are_counted_too(lab: Lab) -> None:
    """Else a part that needs a while to fail would be started for ever."""
    part = lab.part(SERVES, ready=serves)
    part.start()
    lab.until_ready(part)
    lab.write(part, SAYS.format(code=1))
    with fails_with(StartupError, " 6 times", "code 1", "last words"):
        for _ in range(3 * component._MAX_RESTARTS):
            # The first is the ready life, which is killed.
            lab.die(part) if part.restarts == 0 else lab.until_noticed(part)
            lab.now += 2 * component._WINDOW
            part.check()
    assert part.restarts == component._MAX_RESTARTS + 1


def test_lives_that_come_to_nothing_are_counted_too(lab: Lab) -> None:
    steps = [0]
    part = lab.part(FAILS.format(code=1), ready=serves, progress=lambda: steps[0])
    part.start()
    lab.until_ready(part)

    def lives(count: int) -> None:
        for _ in range(count):
            lab.die(part, signal.SIGUSR1)
            lab.now += 2 * component._WINDOW
            lab.until_ready(part)

    lives(component._MAX_RESTARTS - 1)
    # What the present life comes to.
    steps[0] += 1
    lives(1 + component._MAX_RESTARTS)
    with fails_with(StartupError, " 6 times"):
        lives(1)


def test_a_crash_is_a_failure_of_its_own(lab: Lab) -> None:
    part = lab.part(SERVES, ready=serves, progress=lambda: 0)
    part.start()
    lab.until_ready(part)
    with fails_with(StartupError, " 6 times", "SIGSEGV"):
        for _ in range(component._MAX_RESTARTS + 1):
            lab.die(part, signal.SIGSEGV)
            lab.now += 2 * component._WINDOW
            lab.until_ready(part)


def test_a_part_that_is_killed_is_not_blamed_for_coming_to_nothing(lab: Lab) -> None:
    part = lab.part(SERVES, ready=serves, progress=lambda: 0)
    part.start()
    lab.until_ready(part)
    for _ in range(2 * component._MAX_RESTARTS):
        lab.die(part)
        lab.now += 2 * component._WINDOW
        lab.until_ready(part)
    assert part.restarts == 2 * component._MAX_RESTARTS


SLOWLY = component._WINDOW / component._MAX_RESTARTS + 1
"""Seconds between deaths of which there are never too many in a minute."""


@pytest.mark.parametrize(
    ("number", "most"),
    [(signal.SIGUSR1, component._MAX_FAILURES), (signal.SIGKILL, component._MAX_DEATHS)],
)
def test_slow_deaths_are_counted_too(lab: Lab, number: signal.Signals, most: int) -> None:
    """Of its own it may die less often than by others."""
    part = lab.part(FAILS.format(code=1), ready=serves)
    part.start()
    lab.until_ready(part)
    for _ in range(most):
        lab.die(part, number)
        lab.now += SLOWLY
        lab.until_ready(part)
    with fails_with(StartupError, f" {most + 1} times"):
        lab.die(part, number)


def test_very_slow_deaths_are_forgotten(lab: Lab) -> None:
    part = lab.part(FAILS.format(code=1), ready=serves)
    part.start()
    lab.until_ready(part)
    for _ in range(component._MAX_FAILURES + 5):
        lab.die(part, signal.SIGUSR1)
        lab.now += component._LONG_WINDOW / component._MAX_FAILURES
        lab.until_ready(part)


def test_one_that_is_killed_before_each_step_is_given_up_at_last(lab: Lab) -> None:
    """As the system does with a trainer whose step needs more memory than there is."""
    part = lab.part(SERVES, ready=serves, progress=lambda: 0)
    part.start()
    lab.until_ready(part)
    for _ in range(component._MAX_DEATHS):
        lab.die(part)
        lab.now += component._LONG_WINDOW
        lab.until_ready(part)
    with fails_with(StartupError, f" {component._MAX_DEATHS + 1} times"):
        lab.die(part)


def test_a_part_that_is_killed_at_its_first_start_is_started_again(lab: Lab) -> None:
    part = lab.part(SERVES, ready=lambda p: p is not lab.processes[0] and serves(p))
    part.start()
    until(lambda: serves(lab.processes[0]))
    lab.die(part)
    lab.again(part)
    assert lab.said == [
        "part 0    ended by SIGKILL; starting it again",
        "part 0    ready again",
    ]


def test_a_part_is_said_to_be_ready_once_it_has_opened(lab: Lab) -> None:
    opened = False
    part = lab.part(SERVES, ready=serves, opened=lambda: opened)
    part.start()
    lab.until_ready(part)
    part.check()
    assert lab.said == []
    lab.die(part)
    lab.again(part)
    opened = True
    part.check()
    part.check()
    assert lab.said == ["part 0    ended by SIGKILL; starting it again", "part 0    ready again"]


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_first_start_that_fails_is_not_repeated(lab: Lab, code: int) -> None:
    part = lab.part(SAYS.format(code=code), ready=lambda _: False)
    part.start()
    with pytest.raises(StartupError) as raised:
        lab.until_noticed(part)
    assert raised.value.message.startswith(f"part 0 could not start (ended with code {code}):\n")
    assert "    first\n    last words\n  log: " in raised.value.message


@pytest.mark.parametrize("life", ["first", "second"])
def test_a_refused_configuration_is_not_tried_again(lab: Lab, life: str) -> None:
    bad = SAYS.format(code=2)
    part = lab.part(bad if life == "first" else SERVES, ready=serves)
    part.start()
    if life == "second":
        lab.until_ready(part)
        lab.write(part, bad)
        lab.die(part)
        lab.now += 5
        part.check()
    with fails_with(ConfigError, "part 0 ", "last words"):
        lab.until_noticed(part)


def test_a_part_that_does_not_get_ready_in_time_ends_the_start(lab: Lab) -> None:
    part = lab.part(SERVES, ready=lambda _: False, timeout=60)
    part.start()
    until(lambda: serves(lab.processes[0]))
    lab.now = 59.9
    part.check()
    lab.now = 60
    with fails_with(StartupError, "part 0 ", "60 s", "\n    serves"):
        part.check()


def test_a_part_that_hangs_is_to_blame_for_its_death(lab: Lab) -> None:
    part = lab.part(SERVES, ready=serves)
    part.start()
    lab.until_ready(part)
    os.kill(part.pid, signal.SIGSTOP)
    part.kill("hangs")
    lab.until_noticed(part)
    lab.again(part)
    assert lab.said[1:] == [
        "part 0    hangs; killing it",
        "part 0    ended by SIGKILL; starting it again",
        "part 0    ready again",
    ]
    lab.die(part)
    # Its own, and somebody else's.
    assert [own for _, own in part._history._deaths] == [True, False]


def test_a_question_that_fails_is_asked_again(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    asked = 0

    def ready(process: SupervisedProcess) -> bool:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise RuntimeError("planted")
        return serves(process)

    part = lab.part(SERVES, ready=ready)
    part.start()
    lab.until_ready(part)
    assert [record.message for record in caplog.records] == [
        "part-0: the readiness check failed; trying again"
    ]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_part_that_has_done_its_work_is_not_started_again(lab: Lab, when: str) -> None:
    """Before or after it was seen to be ready."""
    ready = serves if when == "after" else lambda _: False
    part = lab.part(FAILS.format(code=0), ready=ready, finishes=True)
    part.start()
    until(lambda: serves(lab.processes[0]))
    if when == "after":
        lab.until_ready(part)
    os.kill(part.pid, signal.SIGUSR1)
    lab.until_ended(part)
    assert part.finished
    lab.now += 100
    part.check()
    assert (part.state, part.restarts) == ("ended", 0)


def test_work_that_fails_is_begun_again(lab: Lab) -> None:
    part = lab.part(FAILS.format(code=1), ready=serves, finishes=True)
    part.start()
    lab.until_ready(part)
    lab.write(part, FAILS.format(code=0))
    lab.die(part, signal.SIGUSR1)
    lab.again(part)
    os.kill(part.pid, signal.SIGUSR1)
    lab.until_ended(part)
    assert part.finished
    assert lab.said[1:] == [
        f"part 0    ended with code 1; starting it again (log: {lab.processes[0].log})",
        "part 0    ready again",
    ]


def test_a_slow_answer_delays_nobody(lab: Lab) -> None:
    """The caller of `check` has other parts to look after, and perhaps an event loop."""
    asked: list[threading.Thread] = []
    answer = threading.Event()

    def slow(_: SupervisedProcess) -> bool:
        asked.append(threading.current_thread())
        return answer.wait(60)

    first, second = lab.part(SERVES, "a-0", ready=slow), lab.part(SERVES, "b-0", ready=serves)
    first.start()
    until(lambda: asked)
    assert asked[0] is not threading.current_thread()
    first.check()
    second.start()
    lab.until_ready(second)
    assert first.state == "starting"
    answer.set()
    lab.until_ready(first)
    assert len(asked) == 1


def test_a_restart_delays_nobody(lab: Lab) -> None:
    first, second = lab.part(SERVES, "a-0", ready=serves), lab.part(SERVES, "b-0", ready=serves)
    for part in (first, second):
        part.start()
        lab.until_ready(part)
    lab.die(first)
    lab.die(second)
    # The clock stands still: both wait for their time, and neither check does.
    first.check()
    second.check()
    assert (first.state, second.state) == ("restarting", "restarting")
    lab.again(second)
    assert first.state == "restarting"
    lab.again(first)


def test_a_process_that_is_slow_to_make_delays_nobody(lab: Lab) -> None:
    """The launcher reads an engine's weights before it starts one again."""
    first, second = lab.part(SERVES, "a-0", ready=serves), lab.part(SERVES, "b-0", ready=serves)
    for part in (first, second):
        part.start()
        lab.until_ready(part)
    make, read = first.make, threading.Event()
    makers: list[threading.Thread] = []

    def slow() -> SupervisedProcess:
        makers.append(threading.current_thread())
        assert read.wait(60)
        return make()

    first.make = slow
    lab.die(first)
    lab.die(second)
    first.check()
    lab.now += 5
    first.check()
    lab.again(second)
    assert first.state == "restarting"
    read.set()
    until(lambda: (first.check(), first.state == "ready")[1])
    assert len(makers) == 1 and makers[0] is not threading.current_thread()
    assert len(lab.processes) == 4


def test_a_process_that_is_never_made_is_given_up(lab: Lab) -> None:
    part = lab.part(SERVES, ready=serves, timeout=300.0)
    part.start()
    lab.until_ready(part)
    read = threading.Event()
    part.make = lambda: read.wait(60) and None  # type: ignore[assignment, return-value]
    lab.die(part)
    part.check()
    lab.now += 5
    part.check()
    lab.now += 301
    with fails_with(StartupError, "part 0 ", "within 300 s"):
        part.check()
    read.set()


NO_MEMORY = OSError(12, "Cannot allocate memory")
IMPOSSIBLE = pytest.mark.parametrize(
    "error", [NO_MEMORY, subprocess.SubprocessError("Exception occurred in preexec_fn.")]
)


def never(error: Exception) -> Callable[[], SupervisedProcess]:
    def make() -> SupervisedProcess:
        raise error

    return make


@IMPOSSIBLE
def test_a_start_that_is_impossible_for_a_while(lab: Lab, error: Exception) -> None:
    part = lab.part(SERVES, ready=serves)
    part.start()
    lab.until_ready(part)
    make, part.make = part.make, never(error)
    lab.die(part)
    lab.now += 5
    part.check()
    assert lab.said[-1] == f"part 0    could not be started ({error}); starting it again"
    part.make = make
    lab.again(part)


@IMPOSSIBLE
def test_a_first_start_that_is_impossible_is_told_as_such(error: Exception) -> None:
    part = Component("part-0", never(error), say=print, ready=serves)
    with pytest.raises(StartupError) as raised:
        part.start()
    assert raised.value.message == f"part 0 could not be started: {error}"


def test_a_stopped_part_stays_so(lab: Lab) -> None:
    part = lab.part(SERVES, ready=serves)
    part.start()
    lab.until_ready(part)
    part.terminate()
    part.stop(grace=5)
    lab.now += 100
    part.check()
    assert (part.state, part.restarts, part.finished) == ("ended", 0, False)
    assert lab.processes[0].poll() == -signal.SIGTERM
    assert len(lab.processes) == 1


def test_a_part_that_waits_for_its_restart_is_not_started_by_a_stop(lab: Lab) -> None:
    part = lab.part(SERVES, ready=serves)
    part.start()
    lab.until_ready(part)
    lab.die(part)
    part.stop(grace=5)
    lab.now += 100
    part.check()
    assert len(lab.processes) == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "ended with code 0"), (143, "ended with code 143"), (-9, "ended by SIGKILL")],
)
def test_an_exit_is_told_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_an_unknown_signal_is_told_by_its_number() -> None:
    assert describe_exit(-34 - 10) == "ended by signal 44"


def test_deaths_on_a_full_disk_cost_no_attempts(lab: Lab) -> None:
    full = True
    part = lab.part(FAILS.format(code=1), ready=serves, starved=lambda: full)
    part.start()
    lab.until_ready(part)
    lab.die(part, signal.SIGUSR1)
    for _ in range(5 * component._MAX_RESTARTS):
        lab.now += 60
        part.check()
    assert (part.state, part.restarts) == ("restarting", 1)
    full = False
    lab.again(part)
    assert part._history.record_death(lab.now, failed=True) is None
    assert len(part._history._deaths) == 1, "the death on the full disk was counted"
    assert lab.said[1] == (
        "part 0    ended with code 1, its disk is full; it starts again when it has space"
    )


@pytest.mark.parametrize("hangs", [False, True])
def test_a_part_that_is_killed_on_a_full_disk_starts_again_there(lab: Lab, hangs: bool) -> None:
    """An engine, for example, needs no space."""
    part = lab.part(FAILS.format(code=1), ready=serves, starved=lambda: True)
    part.start()
    lab.until_ready(part)
    if hangs:
        part.kill("has not answered for 30 s")
        lab.until_noticed(part)
    else:
        lab.die(part)
    lab.again(part)


def test_a_start_on_a_full_disk_gets_more_time(lab: Lab) -> None:
    full = True
    part = lab.part("import signal\nsignal.pause()", ready=lambda _: False, starved=lambda: full)
    part.start()
    for _ in range(10):
        lab.now += part.timeout + 1
        part.check()
    assert part.state == "starting"
    full = False
    lab.now += 2 * part.timeout
    with fails_with(StartupError, "part 0 ", "not ready"):
        part.check()
