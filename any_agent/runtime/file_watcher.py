"""A small file's content, read again when it changes while a service runs."""

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
    """The result of ``parse`` for a file, or ``missing`` if there was no file from the start.

    The file is checked, by opening it, at most once in ``every`` seconds. If it is broken, or
    vanishes later, that is logged once and the last good content stays: an empty one could grant
    what the file denies. A file that cannot be read is tried again at each check. The first reading
    raises the errors of ``parse``.
    """

    def __init__(
        self, path: Path, parse: Callable[[bytes], T], missing: T, *, every: float = 1.0
    ) -> None:
        self._path = path
        self._parse = parse
        self._every = every
        self._checked_at = time.monotonic()
        self._complaint = ""
        self._mark = self._find()
        self._value = missing if self._mark is None else parse(path.read_bytes())

    def get(self, *, within: float | None = None) -> T:
        """Return the content of at most ``within`` (default: ``every``) seconds ago."""
        now = time.monotonic()
        if now - self._checked_at >= (self._every if within is None else within):
            self._checked_at = now
            self._refresh()
        return self._value

    def _refresh(self) -> None:
        try:
            mark = self._find()
            if mark == self._mark:
                return
            # Set before reading, so that the next check sees a change during the reading.
            self._mark = mark
            self._value = self._parse(self._path.read_bytes())
        except (OSError, ValueError, AnyAgentError) as error:
            if isinstance(error, OSError):
                # Read again at the next check.
                self._mark = None
            self._complain(str(error))
        else:
            self._complaint = ""

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            log.error("cannot use %s; keeping its earlier content: %s", self._path, what)
        self._complaint = what

    def _find(self) -> Mark | None:
        try:
            # A network file system may report outdated attributes of a file that is not open, and
            # a revoked key would stay valid for as long.
            with open(self._path, "rb") as file:
                found = os.fstat(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
