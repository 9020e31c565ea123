"""Ctrl-C and SIGTERM in a training script: the first ends the current step, the next ends now."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(SystemExit):
    """A signal ended training; the exit code is the one that shells expect."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    @property
    def gently(self) -> bool:
        """True if calls under way may end first."""
        return self.number == signal.SIGTERM


class StopSignals:
    """Handles the two signals between :meth:`install` and :meth:`restore`.

    Outside the main thread, where no signal arrives, it does nothing.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[int, signal.Handlers | Callable[..., object] | int | None] = {}
        self.stop: Callable[[], None] | None = None
        """Ends training after the current step; None while there is nothing to save."""
        self.failure: Callable[[], BaseException | None] = lambda: None
        """Returns the error that interrupted the process, if it was no person."""
        self.received: int | None = None
        """The first signal."""

    @property
    def installed(self) -> bool:
        return bool(self._before)

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _NUMBERS}

    def restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def ignore(self) -> None:
        """Ignore both signals, so that neither interrupts the service's end."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        failure = self.failure()
        if failure is not None:
            raise failure
        if self.stop is None or self.received is not None:
            raise StopRequested(number)
        self.received = number
        self._say(
            "trainer   stopping after the current step, with a checkpoint; the same signal again "
            "stops at once, and the next start repeats the steps after the last checkpoint"
        )
        self.stop()
