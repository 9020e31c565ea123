"""Items of a data loader's batch, which is a list of items or torch's columns of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from any_agent.data.rows import rows_of_table
from any_agent.errors import DatasetError

_EXACT = ("torch.int64", "torch.float64", "torch.bool")
"""The dtypes to which torch converts Python's own numbers."""
_FIX = "give the DataLoader collate_fn=lambda items: items"


def items_of(batch: Any) -> list[dict[str, Any]]:
    """Return the items of a batch: a list of mappings, a table of pandas, polars or Arrow, or the
    columns of torch's default collate.

    Those columns are converted back into numbers, strings, lists and mappings; fields that were
    tensors or arrays of one dimension or more stay tensors. Raises DatasetError naming a field that
    cannot be converted, TypeError for a value that is not a batch.
    """
    if isinstance(batch, Mapping):
        return _of_columns(batch)
    if (rows := rows_of_table(batch)) is not None:
        batch = rows
    if isinstance(batch, str | bytes) or not isinstance(batch, Iterable):
        raise TypeError(f"a batch is a list of dictionaries, or their columns, not {_kind(batch)}")
    items = list(batch)
    for k, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise TypeError(
                f"item {k} of the batch is {_kind(item)}: items are dictionaries (a DataLoader of "
                "torch: collate_fn=lambda items: items)"
            )
    # Rows of our datasets stay as they are, because they know their file and line.
    return [item if isinstance(item, dict) else dict(item) for item in items]


def gives_columns(loader: Any) -> bool:
    """Return whether a loader uses torch's own collation, which makes columns of items."""
    collate = getattr(loader, "collate_fn", None)
    of_torch = str(getattr(collate, "__module__", "")).startswith("torch.utils.data")
    return of_torch and getattr(collate, "__name__", "") == "default_collate"


def _of_columns(columns: Mapping[Any, Any]) -> list[dict[str, Any]]:
    lengths = {str(name): _length(value, str(name)) for name, value in columns.items()}
    known = {length for length in lengths.values() if length is not None}
    if len(known) != 1:
        found = ", ".join(f"{name}: {length}" for name, length in lengths.items()) or "no field"
        raise DatasetError(f"the batch's columns differ in their number of items ({found}): {_FIX}")
    (count,) = known
    return [{name: _item(value, k) for name, value in columns.items()} for k in range(count)]


def _length(value: Any, where: str) -> int | None:
    """Return the number of items in a column; None for a column of empty lists or mappings."""
    if hasattr(value, "detach"):
        if not value.dim():
            raise DatasetError(f"{where} is one number for all items: {_FIX}")
        if value.dim() == 1 and str(value.dtype) not in _EXACT:
            # For example whole numbers and fractions that were converted to one type.
            raise DatasetError(
                f"{where} is {value.dtype}: the items' own numbers cannot be recovered; {_FIX}"
            )
        return int(value.shape[0])
    if isinstance(value, Mapping):
        parts = {f"{where}.{name}": part for name, part in value.items()}
    elif isinstance(value, list | tuple):
        if value and all(isinstance(one, str | bytes) for one in value):
            return len(value)
        parts = {f"{where}[{k}]": part for k, part in enumerate(value)}
    else:
        raise DatasetError(f"{where} is {_kind(value)}, which is not a column: {_FIX}")
    lengths = {_length(part, name) for name, part in parts.items()} - {None}
    if len(lengths) > 1:
        raise DatasetError(f"{where} has columns of {sorted(map(str, lengths))} items: {_FIX}")
    return lengths.pop() if lengths else None


def _item(value: Any, k: int) -> Any:
    """Return the k-th item's value of a column."""
    if hasattr(value, "detach"):
        return value[k].item() if value.dim() == 1 else value[k]
    if isinstance(value, Mapping):
        return {name: _item(part, k) for name, part in value.items()}
    if value and isinstance(value[0], str | bytes):
        return value[k]
    return [_item(part, k) for part in value]


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"
