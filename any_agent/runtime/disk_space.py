"""Full disks: when one will be, how an error tells of one, and writes that wait for space."""

from __future__ import annotations

import errno
import logging
import math
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from any_agent.errors import StoreFull

log = logging.getLogger(__name__)
T = TypeVar("T")

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_IN_TEXT = re.compile(r"(?:\[Errno |\(os error )(?:{}|{})[\])]".format(*_NUMBERS))
"""The same in a message: of libraries in Rust, and of another process."""
_SPARE = 1 << 20  # bytes that must be free for a start, or another try
POLL_INTERVAL = 1.0  # seconds between two looks at the disk; no event tells of space
_LOOKS, _LEAST_SEEN = 360, 600.0
"""Looks of a forecast that are kept, an hour's, and the seconds of them that tell of a rate."""
_MAX_DELAY = 30.0
"""Seconds between two tries where the disk seems to have space, as it does under a quota."""


def is_disk_full(error: BaseException | None) -> bool:
    """Return True if an error, or one that caused it, means a full disk or an exhausted quota."""
    while error is not None:
        if isinstance(error, StoreFull) or getattr(error, "errno", None) in _NUMBERS:
            return True
        if _IN_TEXT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def has_space(*folders: Path) -> bool:
    """Return False if a megabyte cannot be written into one of the folders."""
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                if file.write(bytes(_SPARE)) < _SPARE:
                    return False
        except OSError as error:
            if is_disk_full(error):
                return False
    return True


class DiskWaitEnded(Exception):
    """A write was given up, because the process is to end while it waits for space."""


@dataclass(frozen=True, slots=True)
class DiskWait:
    """A write that waits for space."""

    what: str
    folder: Path
    needed: int

    def __str__(self) -> str:
        size = f", {self.needed:,} bytes needed" if self.needed else ""
        return f"disk full{size}: {self.what} waits for space in {self.folder}"


class DiskSpace:
    """Makes writes that a full disk refuses again until they succeed, and tells of the wait."""

    def __init__(self) -> None:
        self.waiting: DiskWait | None = None
        """The write that waits now; other threads may read it."""
        self._stopping = False

    def stop(self) -> None:
        """End a wait, now and from now on, by DiskWaitEnded; safe in a signal handler."""
        self._stopping = True

    def write(
        self, work: Callable[[], T], folder: Path, what: str, needed: Callable[[], int] = int
    ) -> T:
        """Return ``work()``, which has no effect when it fails for want of space in ``folder``.

        ``needed`` returns the bytes that it will certainly write: while fewer are free, it is not
        even tried, so that other parts can use what is left.
        """
        wait = DiskWait(what, folder, needed())
        delay = 0.0
        try:
            while True:
                if delay or _free(folder) < wait.needed:
                    self._wait(wait, delay)
                try:
                    return work()
                except Exception as error:
                    if not is_disk_full(error):
                        raise
                    log.debug("%s", wait, exc_info=True)
                delay = min(max(POLL_INTERVAL, 2 * delay), _MAX_DELAY)
        finally:
            if self.waiting is not None:
                self.waiting = None
                log.warning("the wait for disk space has ended: %s", what)

    def _wait(self, wait: DiskWait, delay: float) -> None:
        """Sleep for ``delay`` seconds, and then until there is space."""
        if self.waiting is None:
            self.waiting = wait
            log.warning("%s; free some, and it goes on by itself", wait)
        earliest = time.monotonic() + delay
        while time.monotonic() < earliest or _free(wait.folder) < max(wait.needed, _SPARE):
            if self._stopping:
                raise DiskWaitEnded(str(wait))
            time.sleep(POLL_INTERVAL)


class DiskForecast:
    """Tells when a disk will be full, if it goes on filling as it did in the last hour."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=_LOOKS)
        self.free: int | None = None
        """Bytes that were free at the last look; None before any."""
        self.seconds_left = math.inf
        """Infinite for a disk that does not fill up, and in the first ten minutes."""

    def look(self) -> None:
        """Look at the disk: every ten seconds, in a thread, as it may hang."""
        self.free = _free(self._folder)
        now = self._clock()
        self._seen.append((now, self.free))
        (began, _), middle = self._seen[0], (self._seen[0][0] + now) / 2
        if now - began < _LEAST_SEEN:
            return
        # The least of each half: what is written and removed again and again, as checkpoints are,
        # is not growth.
        before = min(free for at, free in self._seen if at <= middle)
        after = min(free for at, free in self._seen if at > middle)
        rate = (before - after) / (now - middle)
        self.seconds_left = after / rate if rate > 0 else math.inf


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
