"""Ctrl-C and SIGTERM in a training script: the first one ends training well, the next at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(SystemExit):
    """The script was told to end, and its training has: with the exit code that shells expect."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    @property
    def gently(self) -> bool:
        """Whether what others have under way may end first."""
        return self.number == signal.SIGTERM


class StopSignals:
    """What the process does with the two signals between :meth:`take` and :meth:`give_back`.

    Nothing of it outside the main thread, where no signal arrives.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[int, signal.Handlers | Callable[..., object] | int | None] = {}
        self.stop: Callable[[], None] | None = None
        """Ends what is under way as it should be ended; None while there is nothing to keep."""
        self.failure: Callable[[], BaseException | None] = lambda: None
        """What the process was interrupted for, if no person did it."""
        self.asked: int | None = None
        """The signal that came first."""

    @property
    def taken(self) -> bool:
        return bool(self._before)

    def take(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._came) for number in _NUMBERS}

    def give_back(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def ignore(self) -> None:
        """Nothing may keep the service's end from happening."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _came(self, number: int, frame: FrameType | None) -> None:
        failure = self.failure()
        if failure is not None:
            raise failure
        if self.stop is None or self.asked is not None:
            raise StopRequested(number)
        self.asked = number
        self._say(
            "trainer   stopping: the step under way is ended and a checkpoint kept; the same again "
            "stops at once, and what came after the last checkpoint is made again then"
        )
        self.stop()
