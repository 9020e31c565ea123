"""Lines of a file as it grows."""

from __future__ import annotations

import json
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
                file.seek(self._offset)
                *lines, rest = file.read().split(b"\n")
                self._offset = file.tell() - len(rest)
        except FileNotFoundError:
            return []
        return [line.decode(errors="replace") for line in lines]

    def new_records(self) -> list[dict[str, Any]]:
        """Return the new lines of a JSONL file, without what a writer that died left of one."""
        records = []
        for line in self.new_lines():
            with suppress(json.JSONDecodeError):
                records.append(json.loads(line))
        return records
