"""A dataset whose rows know their file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

from any_agent.errors import DatasetError

_T = TypeVar("_T")


class MissingField(KeyError):
    """A row of the dataset lacks a field that an agent or a workflow reads."""

    def __str__(self) -> str:
        return str(self.args[0])


class DataRow(dict[str, Any]):
    """One item: a dictionary that names its file and line when a field is missing."""

    __slots__ = ("where",)

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        super().__init__(fields)
        self.where = where

    def __missing__(self, field: str) -> Any:
        has = ", ".join(map(str, self)) or "none"
        raise MissingField(f"{self.where} has no field {field!r}; its fields are: {has}")

    def __reduce__(self) -> tuple[Any, ...]:
        return DataRow, (dict(self), self.where)


class RowSource(Protocol):
    """An object with a length and an index: a list, a `datasets.Dataset`, a map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, k: int, /) -> Any: ...


class LazyRows:
    """Rows that ``read`` makes when they are requested, so that no two callers share one."""

    def __init__(self, length: int, read: Callable[[int], Any]) -> None:
        self._length = length
        self._read = read

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, k: int) -> Any:
        return self._read(k)


class RowDataset(Sequence[DataRow]):
    """Items that can be indexed, as :func:`get_custom_dataset` returns them.

    ``where`` names the place of the source's k-th row, for errors. ``map``, ``filter``, ``select``
    and ``remove_columns`` work as in `datasets`, and return a new dataset.
    """

    def __init__(
        self, source: RowSource, where: Callable[[int], str], *, at: Sequence[int] | None = None
    ) -> None:
        self._source = source
        self._name = where
        self._at = range(len(source)) if at is None else at

    def __len__(self) -> int:
        return len(self._at)

    @overload
    def __getitem__(self, k: int) -> DataRow: ...

    @overload
    def __getitem__(self, k: slice) -> RowDataset: ...

    def __getitem__(self, k: int | slice) -> DataRow | RowDataset:
        if isinstance(k, slice):
            return RowDataset(self._source, self._name, at=self._at[k])
        where, fields = self.where(k), self._source[self._at[k]]
        if not isinstance(fields, Mapping):
            raise DatasetError(
                f"{where} is a {type(fields).__name__}: an item must be a mapping of fields"
            )
        return DataRow(fields, where)

    def where(self, k: int) -> str:
        """Return the place of the k-th item, usually its file and line."""
        return self._name(self._at[k])

    @property
    def column_names(self) -> list[str]:
        """The fields of the first item; other items may have other fields."""
        return list(self[0]) if len(self) else []

    def select(self, indices: Iterable[int]) -> RowDataset:
        """Return the items at these places, in this order."""
        return RowDataset(self._source, self._name, at=[self._at[k] for k in indices])

    def map(self, function: Callable[[DataRow], Mapping[str, Any]]) -> RowDataset:
        """Return each item with the fields that ``function`` returns for it added or replaced."""
        return self._made([{**row, **self._call(function, row)} for row in self])

    def filter(self, function: Callable[[DataRow], bool]) -> RowDataset:
        """Return the items for which ``function`` returns true."""
        return self.select(k for k, row in enumerate(self) if self._call(function, row))

    def remove_columns(self, names: str | Sequence[str]) -> RowDataset:
        """Return the items without these fields."""
        gone = {names} if isinstance(names, str) else set(names)
        return self._made([{f: v for f, v in row.items() if f not in gone} for row in self])

    def require(self, *fields: str) -> RowDataset:
        """Return this dataset; DatasetError unless every item has these fields."""
        if fields:
            for row in self:
                self._call(lambda row: [row[field] for field in fields], row)
        return self

    def _made(self, rows: list[dict[str, Any]]) -> RowDataset:
        return RowDataset(rows, self.where)

    def _call(self, function: Callable[[DataRow], _T], row: DataRow) -> _T:
        try:
            return function(row)
        except MissingField as error:
            raise DatasetError(str(error)) from None
        except Exception as error:
            name = getattr(function, "__name__", "the function")
            raise DatasetError(
                f"{row.where}: {name} raised {type(error).__name__}: {error}"
            ) from error


def rows_of_table(data: Any) -> list[Any] | None:
    """Return the rows of a table of pandas, polars or Arrow, whose own items are its columns.

    None for other data. Raises DatasetError if columns have no text, or the same, as their name.
    """
    for method in ("to_dicts", "to_pylist"):
        if hasattr(data, method):
            return list(getattr(data, method)())
    if not (hasattr(data, "iloc") and hasattr(data, "to_dict")):
        return None
    if not hasattr(data, "columns"):
        return list(data.tolist())
    names = list(data.columns)
    if len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise DatasetError(
            f"the columns of a {type(data).__name__} are {names!r:.80}: as fields of items they "
            "need different names, which are texts"
        )
    return list(data.to_dict("records"))


def as_dataset(data: Any, name: str) -> RowDataset:
    """Return data (see :class:`RowSource`) as a dataset, a table as its rows.

    Raises DatasetError if it is empty or cannot be indexed.
    """
    if (rows := rows_of_table(data)) is not None:
        data = rows
    if isinstance(data, RowDataset):
        dataset = data
    elif isinstance(data, Mapping | str) or not all(
        hasattr(data, method) for method in ("__len__", "__getitem__")
    ):
        raise DatasetError(
            f"{name} is a {type(data).__name__}: pass what get_custom_dataset returns, a list of "
            "dictionaries, or a dataset with a length and an index, such as datasets.Dataset"
        )
    else:
        dataset = RowDataset(data, lambda k: f"{name}[{k}]")
    if not len(dataset):
        raise DatasetError(f"{name} is empty")
    return dataset
