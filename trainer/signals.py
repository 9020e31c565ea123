"""Ctrl-C and SIGTERM in a training script: the first ends the current step, the next ends now."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

from any_agent.runtime.signals import handle_signals

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
    """The handler of the two signals."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.stop: Callable[[], None] | None = None
        """Ends training after the current step; None while there is nothing to save."""
        self.failure: Callable[[], BaseException | None] = lambda: None
        """Returns the error that interrupted the process, if it was no person."""
        self.received: int | None = None
        """The first signal."""

    def handled(self) -> AbstractContextManager[None]:
        """Handle both signals inside the block; outside the main thread, where no signal arrives,
        nothing changes."""
        return handle_signals(self._handle, *_NUMBERS)

    @property
    def installed(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._handle

    def ignore(self) -> None:
        """Ignore both signals to the end of the block, so that neither interrupts the service's."""
        if self.installed:
            for number in _NUMBERS:
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
