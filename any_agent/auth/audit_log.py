"""`AuditLog`: each use and each refusal of a key, one JSON object a line, a file per process.

Fields: ``at`` (UTC), ``event`` (``refused`` or ``used``), ``who``, ``key`` (the id of a key, never
the key; ``claimed`` is the id in a refused key), ``route``, ``sessions``, ``status``, ``client``
(and ``for``: the client that the router named), and ``suppressed``: the refusals and failures since
the line before that were only counted, so that a flood of them neither fills the disk nor pushes
out other lines.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from any_agent.runtime.atomic_files import append_line

log = logging.getLogger(__name__)

_QUEUED = 1024
_MAX_BYTES = 4 << 20
_FILES = 8
_REFUSALS_PER_SECOND = 5.0
_BURST = 20.0
_MAX_SESSIONS = 100


class AuditLog:
    """Writes lines in its own thread, so that no audited request waits for the disk."""

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES, files: int = _FILES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._files = files
        self._lines: queue.Queue[bytes | None] = queue.Queue(_QUEUED)
        self._tokens, self._filled = _BURST, time.monotonic()
        self._suppressed = 0
        self._failed = False
        self.refused: Counter[str] = Counter()
        """Refused requests, by the error's code."""
        self.dropped = 0
        """Lines that were lost because the disk was too slow, or failed."""
        self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
        self._thread.start()

    def refusal(self, code: str, **fields: Any) -> None:
        """Record a request that was refused for its key; a flood of them is only counted."""
        self.refused[code] += 1
        self._add_limited({"event": "refused", "code": code, **fields})

    def use(self, *, sessions: Iterable[str] = (), status: int = 200, **fields: Any) -> None:
        """Record a request with a valid key, and its status.

        Failures are limited like refusals: otherwise one agent's mistakes could push out the lines
        of others.
        """
        named = list(sessions)
        if len(named) > _MAX_SESSIONS:
            fields["more_sessions"] = len(named) - _MAX_SESSIONS
        line = {"event": "used", "sessions": named[:_MAX_SESSIONS], "status": status, **fields}
        (self._add if status < 400 else self._add_limited)(line)

    def _add_limited(self, line: dict[str, Any]) -> None:
        """Add a line about a request without effect, unless there are too many of them."""
        now = time.monotonic()
        refilled = (now - self._filled) * _REFUSALS_PER_SECOND
        self._tokens, self._filled = min(_BURST, self._tokens + refilled), now
        if self._tokens < 1:
            self._suppressed += 1
            return
        self._tokens -= 1
        if self._suppressed:
            line["suppressed"], self._suppressed = self._suppressed, 0
        self._add(line)

    def _add(self, fields: dict[str, Any]) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        try:
            known = {key: value for key, value in fields.items() if value is not None}
            self._lines.put_nowait(orjson.dumps({"at": at, **known}))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout: float = 2.0) -> None:
        """Write the remaining lines."""
        try:
            self._lines.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    # -- in the thread -------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except OSError as error:
                self.dropped += 1
                if not self._failed:
                    log.error("cannot write the audit log, and lines are lost: %s", error)
                self._failed = True
            else:
                self._failed = False

    def _write(self, line: bytes) -> None:
        # Not the run's folder, which may be gone.
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        if self._path.exists() and self._path.stat().st_size + len(line) > self._max_bytes:
            self._rotate()
        append_line(self._path, line.decode())

    def _rotate(self) -> None:
        """Rename ``rank-0.jsonl`` to ``.1``, that to ``.2``, and remove the oldest file."""
        for number in range(self._files - 2, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self._path.replace(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
