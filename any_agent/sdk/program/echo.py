"""Shows what a program writes into a file while it does, as if it had written it here."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_POLL_INTERVAL = 0.05
_AT_ONCE = 65_536


class OutputEcho:
    """Copies a growing file to a descriptor, from a thread: whoever reads there may be slow."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._to = descriptor
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="echo", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Nothing is written any more; returns at once."""
        self._ended.set()

    def finish(self) -> None:
        """Wait until all of it was shown."""
        self._ended.set()
        self._thread.join()

    def _copy(self) -> None:
        position = 0
        while True:
            last = self._ended.wait(_POLL_INTERVAL)
            try:
                position = self._show_from(position)
            except OSError:
                # Nobody reads it any more; it is in the file.
                return
            if last:
                return

    def _show_from(self, position: int) -> int:
        if not self._path.exists():
            return position
        with open(self._path, "rb") as file:
            file.seek(position)
            while part := file.read(_AT_ONCE):
                position += len(part)
                while part:
                    part = part[os.write(self._to, part) :]
        return position
