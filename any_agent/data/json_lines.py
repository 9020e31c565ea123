"""JSON lines: an object on each line of a file or of standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from any_agent.data.rows import LazyRows, RowDataset
from any_agent.errors import DatasetError


def read_json_lines(path: str | Path) -> RowDataset:
    """Read a file, or standard input for the text ``-``; empty lines are skipped.

    Every line is checked. Raises DatasetError naming the file and the line.
    """
    name = "standard input" if path == "-" else str(path)
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise DatasetError(f"cannot read {name}: {error.strerror}") from None
    lines, numbers = [], []
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            _check(line, f"{name} line {number}")
            lines.append(line)
            numbers.append(number)
    rows = LazyRows(len(lines), lambda k: json.loads(lines[k].decode()))
    return RowDataset(rows, lambda k: f"{name} line {numbers[k]}")


def _check(line: bytes, where: str) -> None:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        raise DatasetError(f"{where} is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        hint = "; JSONL has one whole object on each line" if line.strip() in (b"[", b"{") else ""
        raise DatasetError(
            f"{where} is not JSON: {error.msg} at column {error.colno}{hint}"
        ) from None
    except ValueError as error:
        # For example a number of thousands of digits.
        raise DatasetError(f"{where} cannot be read: {error}") from None
    except RecursionError:
        raise DatasetError(f"{where} is nested too deeply") from None
    if not isinstance(value, dict):
        kind = "an array" if isinstance(value, list) else "a single value"
        raise DatasetError(f"{where} is {kind}: each line must be one JSON object, an item")
