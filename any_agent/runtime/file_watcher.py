"""A small file's content, read again when it changes: settings that change while a service runs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from any_agent.errors import AnyAgentError

log = logging.getLogger(__name__)

T = TypeVar("T")
Mark = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """What ``parse`` makes of a file, or ``missing`` where there was none from the start.

    A look opens the file, and there is at most one in ``every`` seconds. A file that is broken,
    or gone after it had been there, is said once and keeps the last good content: to take it for
    an empty one could open what it closes. One that cannot be read is tried again at each look.
    The first reading raises what ``parse`` raises.
    """

    def __init__(
        self, path: Path, parse: Callable[[bytes], T], missing: T, *, every: float = 1.0
    ) -> None:
        self._path = path
        self._parse = parse
        self._every = every
        self._looked = time.monotonic()
        self._complaint = ""
        self._mark = self._find()
        self._value = missing if self._mark is None else parse(path.read_bytes())

    def get(self, *, within: float | None = None) -> T:
        """The content, as it was at most ``within`` (default: ``every``) seconds ago."""
        now = time.monotonic()
        if now - self._looked >= (self._every if within is None else within):
            self._looked = now
            self._look()
        return self._value

    def _look(self) -> None:
        try:
            mark = self._find()
            if mark == self._mark:
                return
            # Before the reading: a change in the middle of it is seen by the next look.
            self._mark = mark
            self._value = self._parse(self._path.read_bytes())
        except (OSError, ValueError, AnyAgentError) as error:
            if isinstance(error, OSError):
                # The next look may do better: what the file says must not be missed for good.
                self._mark = None
            self._complain(str(error))
        else:
            self._complaint = ""

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            log.error("%s cannot be used, and goes on as it was: %s", self._path, what)
        self._complaint = what

    def _find(self) -> Mark | None:
        try:
            # Opened each time: what a network file system says of a file that is not open may be
            # some time old, and a revoked key would be good for as long.
            with open(self._path, "rb") as file:
                found = os.fstat(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
