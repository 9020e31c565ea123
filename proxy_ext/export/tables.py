"""The rows of an export as a table: a Parquet file, or a folder of Hugging Face's `datasets`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from any_agent.data.dataset import INSTALL
from any_agent.errors import ConfigError
from any_agent.runtime.atomic_files import atomic_folder
from proxy_ext.export.output import ExportOutput

BATCH_BYTES = 16 << 20
"""Bytes of rows in memory before they are written."""
_SPOOL = ".any-agent-export-"  # prefix of a temporary folder


class Table:
    """Rows that are written in batches of a bounded size."""

    def __init__(self, style: str, schema: Any, write: Callable[[Any], None]) -> None:
        self._json = ("messages", "tools") if style == "messages" else ()
        self._schema = schema
        self._write = write
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def add(self, row: dict[str, Any]) -> None:
        """Add a row of :func:`proxy_ext.export.reader.rows`."""
        plain = row | {name: _texts(row[name]) for name in self._json}
        self._rows.append(plain)
        self._bytes += sum(map(_size, plain.values()))
        if self._bytes >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        import pyarrow as pa

        if not self._rows:
            return
        # Arrow makes nested JSON from texts by a cast alone.
        stored = pa.schema([(field.name, _stored(field.type)) for field in self._schema])
        columns = {
            field.name: pa.array([_plain(row[field.name]) for row in self._rows], field.type)
            for field in stored
        }
        self._write(pa.table(columns, schema=stored).cast(self._schema))
        self._rows, self._bytes = [], 0


@contextmanager
def parquet_table(out: ExportOutput, style: str) -> Iterator[Table]:
    """Write a Parquet file, which `datasets` reads with the types of its columns."""
    schema = _schema(style)
    from pyarrow import parquet

    with parquet.ParquetWriter(out, schema) as writer:
        table = Table(style, schema, writer.write_table)
        yield table
        table.flush()


@contextmanager
def dataset_folder(name: str, style: str) -> Iterator[Table]:
    """Write a new folder for `datasets.load_from_disk`, whole or not at all."""
    target = Path(name)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--out {name} exists: name a new folder")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--out {name}: there is no folder {target.parent}; create it first")
    schema = _schema(style)
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    with TemporaryDirectory(prefix=_SPOOL, dir=target.absolute().parent) as spool:
        rows = Path(spool, "rows.arrow")
        with pa.OSFile(str(rows), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            table = Table(style, schema, writer.write_table)
            yield table
            table.flush()
        with atomic_folder(target, replace=True) as folder:
            found = datasets.Dataset.from_file(str(rows))
            found.save_to_disk(folder, num_shards=None if len(found) else 1)


def _schema(style: str) -> Any:
    """Return the columns of a style. Raises ConfigError without the extra that writes them."""
    try:
        from datasets import Features, Json, List, Value
    except ImportError:
        raise ConfigError(f"this format needs the package datasets: {INSTALL}") from None
    text = Value("string")
    columns: dict[str, Any] = dict.fromkeys(
        ("session_id", "interaction_id", "group_id", "task_id", "state", "reason"), text
    )
    columns["step"] = Value("int64")
    if style == "messages":
        columns |= {"messages": List(Json()), "tools": List(Json()), "reward": Value("float64")}
    else:
        kinds = {
            "input_ids": "int32",
            "loss_mask": "int32",
            "logprobs": "float32",
            "versions": "int32",
            "attention_mask": "bool",
        }
        columns |= {name: List(Value(kind)) for name, kind in kinds.items()}
        columns["rewards"] = Value("float32")
    return Features(columns).arrow_schema


def _stored(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_list(kind) and isinstance(kind.value_type, pa.BaseExtensionType):
        return pa.list_(kind.value_type.storage_type)
    return kind


def _texts(values: list[Any] | None) -> list[str] | None:
    return None if values is None else [json.dumps(value) for value in values]


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, np.ndarray) and not value.shape else value


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    return sum(map(len, value)) if isinstance(value, list) else 64
