"""A small secret file's content, read again when it changes while a service runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from any_agent.errors import AnyAgentError, ConfigError
from any_agent.runtime.file_owner import secret_file

log = logging.getLogger(__name__)

T = TypeVar("T")


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
