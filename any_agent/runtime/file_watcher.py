"""Watches of a running service: of a secret file's content, and of the place of its own files."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from any_agent.errors import AnyAgentError, ConfigError
from any_agent.runtime.file_owner import secret_file

log = logging.getLogger(__name__)

T = TypeVar("T")


class WatchedPath:
    """A folder or a file in use, which somebody may remove, rename or replace meanwhile."""

    def __init__(self, path: Path) -> None:
        """Raises OSError unless it exists."""
        self._path = path
        found = os.stat(path)
        self._id = found.st_dev, found.st_ino
        self._descriptor: int | None = None
        if stat.S_ISDIR(found.st_mode):
            # While it is open, no other folder gets its number. Whoever uses a file has it open;
            # to close it once more would end SQLite's locks on it.
            self._descriptor = os.open(path, os.O_DIRECTORY | os.O_CLOEXEC)

    def is_gone(self) -> bool:
        """Return whether its name is gone, or another's; False while that cannot be seen."""
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return (found.st_dev, found.st_ino) != self._id

    @property
    def held(self) -> Path:
        """The folder itself, whatever has its name by now."""
        return self._path if self._descriptor is None else Path(f"/proc/self/fd/{self._descriptor}")

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class WatchedFile(Generic[T]):
    """The result of ``parse`` for a file, or ``missing`` if there was no file from the start.

    The file must be ours alone (:func:`any_agent.runtime.file_owner.secret_file`).

    The file is read at most once in ``every`` seconds, and parsed if its bytes differ: two writes
    within one tick of a file system's clock may leave equal attributes. If it is broken, or
    vanishes later, that is logged once and the last good content stays: an empty one could grant
    what the file denies. The first reading raises the errors of ``parse``, and ConfigError
    for a file of another user.
    """

    def __init__(
        self, path: Path, parse: Callable[[bytes], T], missing: T, *, every: float = 1.0
    ) -> None:
        self._path = path
        self._parse = parse
        self._every = every
        self._checked_at = time.monotonic()
        self._complaint = ""
        self._content = self._read()
        self._value = missing if self._content is None else parse(self._content)

    def get(self, *, within: float | None = None) -> T:
        """Return the content of at most ``within`` (default: ``every``) seconds ago."""
        now = time.monotonic()
        if now - self._checked_at >= (self._every if within is None else within):
            self._checked_at = now
            self._refresh()
        return self._value

    def _refresh(self) -> None:
        try:
            content = self._read()
            if content == self._content:
                return
            self._content = content
            if content is None:
                raise FileNotFoundError(f"{self._path} is gone")
            self._value = self._parse(content)
        except (OSError, ValueError, AnyAgentError) as error:
            if isinstance(error, OSError | ConfigError):
                # Parsed again once it can be read, also if it has not changed.
                self._content = None
            self._complain(str(error))
        else:
            self._complaint = ""

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            log.error("cannot use %s; keeping its earlier content: %s", self._path, what)
        self._complaint = what

    def _read(self) -> bytes | None:
        # Opened each time: a network file system may keep the content of a file that stays open,
        # and a revoked key would stay valid for as long.
        try:
            with open(self._path, "rb", opener=secret_file) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
