"""What the launchers of other nodes say, for whoever reads the job's own log."""

from __future__ import annotations

from pathlib import Path


class LogTail:
    """Lines of a log as it grows; what was there before is not told."""

    def __init__(self, log: Path, node: str) -> None:
        self._log = log
        self._node = node
        self._offset = log.stat().st_size if log.exists() else 0

    def new_lines(self) -> list[str]:
        """Whole ones only, each with the node's name before it."""
        try:
            with open(self._log, "rb") as file:
                file.seek(self._offset)
                *lines, rest = file.read().split(b"\n")
                self._offset = file.tell() - len(rest)
        except FileNotFoundError:
            return []
        return [f"{self._node:<9} {line.decode(errors='replace')}" for line in lines]
