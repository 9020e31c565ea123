"""Rows of JSONL and Parquet files, and which files of a folder belong to a split."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from any_agent.data.rows import RowDataset
from any_agent.errors import DatasetError

JSONL = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
INSTALL = 'pip install "any-agent-rl[data]"'


def read_file(path: Path) -> RowDataset:
    """All rows of one file, by its ending.

    Raises DatasetError naming the file and, in JSONL, the line.
    """
    if path.suffix in JSONL:
        return _read_jsonl(path)
    if path.suffix in PARQUET:
        return _read_parquet(path)
    raise DatasetError(f"{path} ends in none of {', '.join(JSONL + PARQUET)}: rename or convert it")


def read_files(paths: list[Path]) -> RowDataset:
    """The rows of several files, one after the other."""
    parts = [read_file(path) for path in paths]
    if len(parts) == 1:
        return parts[0]
    places = [(part, k) for part in parts for k in range(len(part))]
    return RowDataset(_Chained(places), lambda k: places[k][0].where(places[k][1]))


def files_of(folder: Path, name: str, split: str | None) -> list[Path]:
    """The files of a split in a folder that is laid out by hand, or as on the Hugging Face hub.

    They are ``<split>.<ending>`` or ``<split>-*.<ending>`` in the folder itself, in its folder
    ``name``, or in its folder ``data``. Raises DatasetError that names the splits there are.
    """
    places = [folder / name] if name else [folder, folder / "data"]
    splits: dict[str, list[Path]] = {}
    for place in places:
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.is_file() and path.suffix in JSONL + PARQUET:
                splits.setdefault(_split_of(path), []).append(path)
    if not splits:
        looked = " or ".join(str(place) for place in places)
        raise DatasetError(
            f"there is no file in {looked} that ends in {', '.join(JSONL + PARQUET)}"
        )
    return splits[chosen(splits, split, folder)]


def chosen(splits: Mapping[str, object], split: str | None, where: object) -> str:
    """The split that was asked for, or the only one."""
    if split is None and len(splits) == 1:
        return next(iter(splits))
    if split in splits:
        assert split is not None
        return split
    there = ", ".join(sorted(splits))
    asked = f"has no split {split!r}" if split else "has several splits"
    raise DatasetError(f"{where} {asked}: set `split` to one of {there}")


def _split_of(path: Path) -> str:
    return path.name.partition(".")[0].partition("-")[0]


class _Lines:
    """JSON objects by their lines: parsed when they are asked for, so each is nobody else's."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, k: int) -> Any:
        return json.loads(self._lines[k].decode())


def _read_jsonl(path: Path) -> RowDataset:
    try:
        raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}") from None
    lines, numbers = [], []
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            _check(line, f"{path} line {number}")
            lines.append(line)
            numbers.append(number)
    return RowDataset(_Lines(lines), lambda k: f"{path} line {numbers[k]}")


def _check(line: bytes, where: str) -> None:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        raise DatasetError(f"{where} is no UTF-8 text") from None
    except json.JSONDecodeError as error:
        hint = "; JSONL has one whole object on each line" if line.strip() in (b"[", b"{") else ""
        raise DatasetError(
            f"{where} is no JSON: {error.msg} at column {error.colno}{hint}"
        ) from None
    except ValueError as error:
        # A number of thousands of digits, say.
        raise DatasetError(f"{where} cannot be read: {error}") from None
    except RecursionError:
        raise DatasetError(f"{where} is nested too deeply") from None
    if not isinstance(value, dict):
        kind = "an array" if isinstance(value, list) else "a single value"
        raise DatasetError(f"{where} is {kind}: each line must be one JSON object, an item")


class _Table:
    """Rows of an Arrow table, as plain Python when they are asked for."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, k: int) -> Any:
        return self._table.slice(k, 1).to_pylist()[0]


def _read_parquet(path: Path) -> RowDataset:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DatasetError(f"reading {path} needs pyarrow: {INSTALL}") from None
    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DatasetError(f"cannot read {path} as Parquet: {error}") from None
    return RowDataset(_Table(table), lambda k: f"{path} row {k + 1}")


class _Chained:
    def __init__(self, places: list[tuple[RowDataset, int]]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, k: int) -> Any:
        part, place = self._places[k]
        return part[place]
