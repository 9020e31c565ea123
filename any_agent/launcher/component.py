"""One part of the service: its process, how it is known to be ready, and its restarts."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Literal

from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.process import SupervisedProcess

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "ended"]

MAX_RESTARTS = 5
"""Within ``WINDOW`` seconds, or in a row for nothing; one more ends the service."""
WINDOW = 60.0
MAX_FAILURES = 20
"""Deaths of its own within ``LONG_WINDOW`` seconds: else one that dies slowly is never given up."""
MAX_DEATHS = 40
"""The same for deaths of every kind, and for those in a row without progress: a trainer that the
system kills for its memory, step by step, is ended by somebody, too."""
LONG_WINDOW = 600.0
_FIRST_DELAY = 0.2
_MAX_DELAY = 5.0
_BY_SOMEBODY = (0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
"""Exit codes of what others end; a crash, such as a segmentation fault, is a failure of its own.

Code 0 is that of proxies and routers that were told to stop.
"""
_IMPOSSIBLE = (OSError, subprocess.SubprocessError)


class Component:
    """Keeps one process running. :meth:`check`, called several times a second, never waits.

    ``make`` gives the process of each start, so that its arguments are those of that moment.
    ``ready`` is asked in a thread, until it is true.
    ``progress``: something that changes while it does its work. ``finishes``: exit code 0 is its
    end, not a failure. ``where`` is said when it is ready first. ``kind`` is what stopping goes
    by, the name up to its hyphen if not told; ``grace`` are seconds that its end takes at least.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], SupervisedProcess],
        *,
        say: Callable[[str], None],
        ready: Callable[[SupervisedProcess], bool],
        progress: Callable[[], object] = lambda: None,
        finishes: bool = False,
        where: str = "",
        kind: str | None = None,
        grace: float = 0.0,
        timeout: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.label = name.replace("-", " ")
        self.kind = kind or name.partition("-")[0]
        self.grace = grace
        self.state: State = "starting"
        self.restarts = 0
        self.finished = False
        """It ended by itself, with success."""
        self._make = make
        self._say = say
        self._ready = ready
        self._progress = progress
        self._finishes = finishes
        self._where = where
        self._timeout = timeout
        self._clock = clock
        self._process: SupervisedProcess | None = None
        self._probe: _Probe | None = None
        self._deaths: list[tuple[float, bool]] = []
        """Of the last while: when, and whether nobody else ended it."""
        self._in_vain = 0
        """Lives in a row that failed and came to nothing."""
        self._stuck = 0
        """Lives in a row without progress, however they ended."""
        self._hung = False
        """This life was ended by :meth:`kill`."""
        self._begun: object = None
        """The progress when this life began."""
        self._due: float | None = None
        """When to start again."""
        self._late = 0.0

    @property
    def pid(self) -> int:
        """Of its process; of the last one, if it is dead."""
        assert self._process is not None, f"{self.label} was not started"
        return self._process.pid

    def start(self) -> None:
        """Start its process; StartupError if that is not possible."""
        try:
            self._launch()
        except _IMPOSSIBLE as error:
            raise StartupError(f"{self.label} could not be started: {error}") from error

    def check(self) -> None:
        """Look once, and do what is due.

        Raises ConfigError for a part that refuses its configuration, StartupError for one that
        cannot start, is not ready in time, or ends again and again.
        """
        if self.state == "ended" or self._process is None:
            return
        if self._due is not None:
            if self._clock() >= self._due:
                self._start_again()
            return
        code = self._process.poll()
        if code is not None:
            self._died(code)
        elif self._probe is not None:
            if self._probe.succeeded:
                self._probe = None
                self._tell_ready()
            elif self._clock() >= self._late:
                raise StartupError(
                    f"{self.label} was not ready after {self._timeout:g} s:\n{self._log()}"
                )

    def kill(self, why: str) -> None:
        """End a process that hangs, which is a failure of its own; `check` starts the next one."""
        self._say(f"{self.label:<9} {why}; killing it")
        self._hung = True
        if self._process is not None:
            self._process.kill()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    @property
    def exit_code(self) -> int | None:
        """Of its process; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def ask_to_drain(self) -> None:
        """SIGTERM: it is to end what it is doing. From now on it is not started again."""
        self.state = "ended"
        self._end_probe()
        if self._process is not None:
            self._process.ask_to_drain()

    def ask_to_stop(self) -> None:
        """It is to end at once; from now on it is not started again."""
        self.state = "ended"
        self._end_probe()
        if self._process is not None:
            self._process.ask_to_stop()

    def stop(self, *, grace: float) -> None:
        """As :meth:`SupervisedProcess.stop`, and never started again."""
        self.state = "ended"
        self._end_probe()
        if self._process is not None:
            self._process.stop(grace=grace)

    # ------------------------------------------------------------------------------------------

    def _tell_ready(self) -> None:
        again = self.state == "restarting"
        self.state = "ready"
        self._say(f"{self.label:<9} ready{' again' if again else self._where}")

    def _launch(self) -> None:
        process = self._make()
        process.start()
        self._process = process
        self._hung = False
        self._late = self._clock() + self._timeout
        self._begun = self._progress()
        self._probe = _Probe(self._ready, process)

    def _start_again(self) -> None:
        self._due = None
        try:
            self._launch()
        except _IMPOSSIBLE as error:
            # No memory, no more processes: it may pass.
            self._in_vain += 1
            self._again(f"could not be started ({error})")

    def _died(self, code: int) -> None:
        failed = self._hung or code not in _BY_SOMEBODY
        self._judge(failed)
        self._end_probe()
        how = how_it_ended(code)
        if code == 0 and self._finishes:
            self.state, self.finished = "ended", True
            return
        if code == ConfigError.exit_code:
            raise ConfigError(f"{self.label} cannot go on as it is configured:\n{self._log()}")
        if self.state == "starting" and code >= 0:
            raise StartupError(f"{self.label} could not start ({how}):\n{self._log()}")
        # Why it failed is in its log; why somebody killed it is not.
        hint = f" (log: {self._process.log})" if code > 0 and self._process else ""
        self._again(how, hint, failed=failed)

    def _judge(self, failed: bool) -> None:
        """Whether this life came to nothing, as those of a part that needs a while to fail do.

        One that is killed is hardly to blame for what it did not do.
        """
        stuck = self._begun is not None and self._begun == self._progress()
        self._stuck = self._stuck + 1 if stuck else 0
        in_vain = self._probe is not None or (failed and stuck)
        self._in_vain = self._in_vain + 1 if in_vain else 0

    def _again(self, how: str, hint: str = "", *, failed: bool = True) -> None:
        """Start it again after a while; StartupError when that was done too often."""
        now = self._clock()
        self._deaths = [d for d in self._deaths if now - d[0] < LONG_WINDOW] + [(now, failed)]
        lately = max(sum(now - at < WINDOW for at, _ in self._deaths), self._in_vain)
        for count, most in (
            (lately, MAX_RESTARTS),
            (sum(own for _, own in self._deaths), MAX_FAILURES),
            (max(len(self._deaths), self._stuck), MAX_DEATHS),
        ):
            if count > most:
                raise StartupError(
                    f"{self.label} ended {count} times ({how} at last):\n{self._log()}"
                )
        self._say(f"{self.label:<9} {how}; starting it again{hint}")
        self.state = "restarting"
        self.restarts += 1
        self._due = now + min(_MAX_DELAY, _FIRST_DELAY * 2.0 ** (lately - 1))

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.end()
            self._probe = None

    def _log(self) -> str:
        assert self._process is not None
        return self._process.last_lines()


class _Probe:
    """Asks in a thread whether a process is ready: a question by HTTP may take its time."""

    def __init__(
        self, ready: Callable[[SupervisedProcess], bool], process: SupervisedProcess
    ) -> None:
        self._ready = ready
        self._process = process
        self._over = threading.Event()
        self.succeeded = False
        self._failed = False
        name = f"ready-{process.name}"
        threading.Thread(target=self._ask, name=name, daemon=True).start()

    def end(self) -> None:
        """Ask no more; the question under way is left to its own time limit."""
        self._over.set()

    def _ask(self) -> None:
        delay = 0.05
        while not self._is_ready():
            if self._over.wait(delay):
                return
            delay = min(delay * 1.3, 0.5)
        self.succeeded = True

    def _is_ready(self) -> bool:
        """A question that fails is a no, told once; else nobody would ask any more."""
        try:
            return self._ready(self._process)
        except Exception:
            if not self._failed:
                log.exception("%s: whether it is ready is asked again", self._process.name)
            self._failed = True
            return False


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
