"""One part of the service: its process, its readiness probe, and its restarts."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeVar

from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.process import SupervisedProcess

log = logging.getLogger(__name__)
_T = TypeVar("_T")

State = Literal["starting", "ready", "restarting", "ended"]

_ENDED_FROM_OUTSIDE = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
"""Exit codes of processes that another process ended; a crash, such as a segmentation fault, is a
failure of the part itself. Proxies and routers that are stopped end with code 0."""
_START_ERRORS = (OSError, subprocess.SubprocessError)

MAX_RESTARTS = 5
"""Deaths within ``_WINDOW`` seconds, and consecutive lives that failed without any result."""
_WINDOW = 60.0
MAX_FAILURES = 20
"""Failures of the part itself within ``_LONG_WINDOW`` seconds; they end a part that dies slowly."""
MAX_DEATHS = 40
"""Deaths of every kind within ``_LONG_WINDOW`` seconds, and consecutive lives without progress,
which end a trainer that the system kills for its memory at every step."""
_LONG_WINDOW = 600.0
_MAKING = 0.05
"""Seconds that a check waits for a process that is made: most are made at once."""
_FIRST_DELAY = 0.2
"""Seconds before the first restart; the delay doubles with each recent death."""
_MAX_DELAY = 5.0


class RestartHistory:
    """The recent deaths of one part, judged by the limits above."""

    def __init__(self) -> None:
        self._deaths: list[tuple[float, bool]] = []
        """Times of death within the long window; True for a failure of the part itself."""
        self._useless_lives = 0
        """Consecutive lives that failed without any result."""
        self._stuck_lives = 0
        """Consecutive lives without progress, however they ended."""

    def end_life(self, *, useless: bool, stuck: bool) -> None:
        self._useless_lives = self._useless_lives + 1 if useless else 0
        self._stuck_lives = self._stuck_lives + 1 if stuck else 0

    def fail_start(self) -> None:
        self._useless_lives += 1

    def record_death(self, now: float, *, failed: bool) -> int | None:
        """Record a death; return the number of deaths if there were too many."""
        recent = [death for death in self._deaths if now - death[0] < _LONG_WINDOW]
        self._deaths = [*recent, (now, failed)]
        limits = (
            (self._recent_deaths(now), MAX_RESTARTS),
            (sum(own for _, own in self._deaths), MAX_FAILURES),
            (max(len(self._deaths), self._stuck_lives), MAX_DEATHS),
        )
        return next((count for count, limit in limits if count > limit), None)

    def delay(self, now: float) -> float:
        """Return the seconds to wait before the next start."""
        growth = 2.0 ** (self._recent_deaths(now) - 1)
        return min(_MAX_DELAY, _FIRST_DELAY * growth)

    def _recent_deaths(self, now: float) -> int:
        deaths = sum(now - at < _WINDOW for at, _ in self._deaths)
        return max(deaths, self._useless_lives)


@dataclass(eq=False)
class Component:
    """Keeps one process running. :meth:`check`, called several times a second, never waits."""

    name: str
    make: Callable[[], SupervisedProcess]
    """Creates the process of each start, with the arguments of that moment; of each start but the
    first in a thread, because it may read large weights."""
    _: KW_ONLY
    say: Callable[[str], None]
    ready: Callable[[SupervisedProcess], bool]
    """Called in a thread until it returns true."""
    opened: Callable[[], bool] = lambda: True
    """Asked once the part is ready: the line that says so waits until it returns true."""
    progress: Callable[[], object] = lambda: None
    """Returns a value that changes while the process works."""
    finishes: bool = False
    """Exit code 0 is the part's end, not a failure."""
    where: str = ""
    """Printed when the part is first ready."""
    kind: str = ""
    """Decides when the part is stopped; by default the name up to its hyphen."""
    grace: float = 0.0
    """More seconds for its stop."""
    timeout: float = 300.0
    """Seconds until a process that was started must be ready."""
    starved: Callable[[], bool] = lambda: False
    """Returns true while the part's disk is full, which no restart can help against."""
    relocate: Callable[[], bool] = lambda: False
    """Called when the process ended too often: moves its next start to another machine, and calls
    :meth:`forget_deaths`, or returns false."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.label = self.name.replace("-", " ")
        self.kind = self.kind or self.name.partition("-")[0]
        self.state: State = "starting"
        self.restarts = 0
        self.finished = False
        """True if the process ended by itself with success."""
        self._history = RestartHistory()
        self._process: SupervisedProcess | None = None
        self._probe: _ReadinessProbe | None = None
        self._killed = False
        """True if :meth:`kill` ended this life."""
        self._first_progress: object = None
        """The progress at the start of this life."""
        self._restart_at: float | None = None
        self._made: Future[SupervisedProcess] | None = None
        """The process of the next start while it is made."""
        self._waits_for_space = False
        """The process ended by itself while its disk was full."""
        self._ready_deadline = 0.0
        self._unsaid = ""
        """The line that waits until the part has opened."""

    @property
    def pid(self) -> int:
        """The process's id, also after its death."""
        assert self._process is not None, f"{self.label} was not started"
        return self._process.pid

    def start(self) -> None:
        """Start the process. Raises StartupError if that is not possible."""
        try:
            self._launch(self.make())
        except _START_ERRORS as error:
            raise StartupError(f"{self.label} could not be started: {error}") from error

    def check(self) -> None:
        """Check the process once, and restart it if that is due.

        Raises ConfigError for a part that refuses its configuration, StartupError for a part that
        cannot start, is not ready in time, or ends too often.
        """
        if self.state == "ended" or self._process is None:
            return
        if self._restart_at is not None:
            if self.clock() < self._restart_at:
                return
            if self._waits_for_space and self.starved():
                self._restart_at = self.clock() + _MAX_DELAY
            else:
                self._restart()
            return
        code = self._process.poll()
        if code is not None:
            self._handle_end(code)
        elif self._probe is not None:
            if self._probe.succeeded:
                self._probe = None
                again = self.state == "restarting"
                self.state = "ready"
                self._unsaid = f"{self.label:<9} ready{' again' if again else self.where}"
            elif self.clock() >= self._ready_deadline:
                if self.starved():
                    self._ready_deadline += self.timeout
                    return
                raise StartupError(
                    f"{self.label} was not ready after {self.timeout:g} s:\n{self._log()}"
                )
        if self._unsaid and self.opened():
            self.say(self._unsaid)
            self._unsaid = ""

    def kill(self, why: str) -> None:
        """Kill a process that hangs, which counts as a failure; `check` starts the next one."""
        self.say(f"{self.label:<9} {why}; killing it")
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def forget_deaths(self) -> None:
        """Judge the part by its next starts only, which are on another machine."""
        self._history = RestartHistory()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def exit_code(self) -> int | None:
        """The process's exit code; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def drain(self) -> None:
        """Signal the process to end its work and itself; it is never started again."""
        if (process := self._retire()) is not None:
            process.drain()

    def terminate(self) -> None:
        """Signal the process to end at once; it is never started again."""
        if (process := self._retire()) is not None:
            process.terminate()

    def stop(self, *, grace: float) -> None:
        """End the process as :meth:`SupervisedProcess.stop`; it is never started again."""
        if (process := self._retire()) is not None:
            process.stop(grace=grace)

    # ------------------------------------------------------------------------------------------

    def _retire(self) -> SupervisedProcess | None:
        self.state = "ended"
        self._end_probe()
        return self._process

    def _launch(self, process: SupervisedProcess) -> None:
        process.start()
        self._process = process
        self._killed = False
        self._ready_deadline = self.clock() + self.timeout
        self._first_progress = self.progress()
        self._probe = _ReadinessProbe(self.ready, process)

    def _restart(self) -> None:
        """Make the next process, and start it once it is made; StartupError if that takes longer
        than a start may."""
        if self._made is None:
            self._made = call_in_thread(self.make, f"make-{self.name}")
            self._ready_deadline = self.clock() + self.timeout
        if not wait([self._made], _MAKING).done:
            if self.clock() >= self._ready_deadline:
                raise StartupError(
                    f"{self.label} could not be started within {self.timeout:g} s: what it needs, "
                    "such as its weights, is still being read"
                )
            return
        made, self._made, self._restart_at = self._made, None, None
        try:
            self._launch(made.result())
        except _START_ERRORS as error:
            # A lack of memory or of processes may be temporary.
            self._history.fail_start()
            self._schedule_restart(f"could not be started ({error})")

    def _handle_end(self, code: int) -> None:
        failed = self._killed or code not in _ENDED_FROM_OUTSIDE
        # A part may need a while to fail. A killed part is not to blame for a lack of progress.
        stuck = self._first_progress is not None and self._first_progress == self.progress()
        useless = self._probe is not None or (failed and stuck)
        self._end_probe()
        how = describe_exit(code)
        if code == 0 and self.finishes:
            self.state, self.finished = "ended", True
            return
        if code == ConfigError.exit_code:
            raise ConfigError(f"{self.label} cannot run as it is configured:\n{self._log()}")
        # What was killed did not end for want of space, and may serve without it.
        self._waits_for_space = failed and not self._killed and self.starved()
        if self._waits_for_space:
            self.say(f"{self.label:<9} {how}, its disk is full; it starts again when it has space")
            self.state = "restarting"
            self.restarts += 1
            self._restart_at = self.clock() + _MAX_DELAY
            return
        if self.state == "starting" and code >= 0:
            raise StartupError(f"{self.label} could not start ({how}):\n{self._log()}")
        self._history.end_life(useless=useless, stuck=stuck)
        # The log tells why a process failed, but not why another process killed it.
        hint = f" (log: {self._process.log})" if code > 0 and self._process else ""
        self._schedule_restart(how, hint, failed=failed)

    def _schedule_restart(self, how: str, hint: str = "", *, failed: bool = True) -> None:
        """Start the process again after a delay; StartupError when it ended too often."""
        now = self.clock()
        count = self._history.record_death(now, failed=failed)
        if count is not None and not self.relocate():
            raise StartupError(f"{self.label} ended {count} times ({how} at last):\n{self._log()}")
        self.say(f"{self.label:<9} {how}; starting it again{hint}")
        self.state = "restarting"
        self.restarts += 1
        self._restart_at = now + self._history.delay(now)

    def _end_probe(self) -> None:
        self._unsaid = ""
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

    def _log(self) -> str:
        assert self._process is not None
        return self._process.last_lines()


def call_in_thread(function: Callable[[], _T], name: str) -> Future[_T]:
    """Call a function in a thread that the end of this process does not wait for."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class _ReadinessProbe:
    """Calls ``ready`` in a thread until it returns true, because an HTTP request may take long."""

    def __init__(
        self, ready: Callable[[SupervisedProcess], bool], process: SupervisedProcess
    ) -> None:
        self._ready = ready
        self._process = process
        self._cancelled = threading.Event()
        self.succeeded = False
        self._logged = False
        name = f"ready-{process.name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def cancel(self) -> None:
        """Stop the calls; a running call ends at its own time limit."""
        self._cancelled.set()

    def _run(self) -> None:
        delay = 0.05
        while not self._is_ready():
            if self._cancelled.wait(delay):
                return
            delay = min(delay * 1.3, 0.5)
        self.succeeded = True

    def _is_ready(self) -> bool:
        """Take an error for a no, and log the first one, so that the thread goes on."""
        try:
            return self._ready(self._process)
        except Exception:
            if not self._logged:
                log.exception("%s: the readiness check failed; trying again", self._process.name)
            self._logged = True
            return False


def describe_exit(code: int) -> str:
    """Return an exit code as words."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
