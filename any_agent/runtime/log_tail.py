"""Files that grow by lines: logs, and records as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any


class LogTail:
    """Reads the lines that were added since the last call; from now on, or ``from_start``.

    A line that is half-written is left for the next call.
    """

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() and not from_start else 0

    def new_lines(self) -> list[str]:
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    # It was written anew.
                    self._offset = 0
                file.seek(self._offset)
                *lines, rest = file.read().split(b"\n")
                self._offset = file.tell() - len(rest)
        except FileNotFoundError:
            return []
        return [line.decode(errors="replace") for line in lines]

    def new_records(self) -> list[dict[str, Any]]:
        """Return the records of a JSONL file's new lines; incomplete lines are skipped."""
        return _parse(self.new_lines())


def records_in(path: Path) -> list[dict[str, Any]]:
    """Return all records of a JSONL file, none without a file; incomplete lines are skipped."""
    return _parse(path.read_text(encoding="utf-8").splitlines()) if path.exists() else []


def _parse(lines: Iterable[str]) -> list[dict[str, Any]]:
    records = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return records
