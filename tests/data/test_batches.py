"""Batches of torch's DataLoader, as items again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from any_agent.data import gives_columns, items_of
from any_agent.errors import DatasetError
from tests.support.errors import fails_with

ITEMS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": f"What is {k} + 1?"},
        ],
        "answer": str(k + 1),
        "n": 2**53 + k,
        "share": 0.1 * k,
        "hard": k % 2 == 0,
        "tags": ["a", str(k)],
        "none": [],
        "point": {"x": k, "y": [k, k]},
    }
    for k in range(5)
]


def loader(items: Any = ITEMS, **options: Any) -> DataLoader[Any]:
    return DataLoader(items, batch_size=2, **options)


@pytest.mark.parametrize("options", [{}, {"collate_fn": lambda items: items}], ids=["own", "list"])
def test_items_come_back_exactly_from_a_collated_batch(options: dict[str, Any]) -> None:
    batches = [items_of(batch) for batch in loader(**options)]
    assert [len(batch) for batch in batches] == [2, 2, 1]
    back = [item for batch in batches for item in batch]
    assert back == ITEMS
    assert [{n: type(v) for n, v in item.items()} for item in back] == [
        {n: type(v) for n, v in item.items()} for item in ITEMS
    ]
    (batch,) = loader([{"image": torch.arange(3) + k} for k in range(2)])
    assert [item["image"].tolist() for item in items_of(batch)] == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize(
    ("batch", "error", "says"),
    [
        ({"a": {"b": torch.tensor([1.0])}}, DatasetError, "a.b is torch.float32"),
        ({"a": torch.tensor(1)}, DatasetError, "collate_fn=lambda"),
        ({"a": torch.tensor([1, 2]), "b": ["x"]}, DatasetError, "(a: 2, b: 1)"),
        ({"a": [("x", "y"), ("z",)]}, DatasetError, "columns"),
        ({"a": None, "b": ["x"]}, DatasetError, "a is NoneType None"),
        ({"a": []}, DatasetError, "(a: None)"),
        ({}, DatasetError, "no field"),
        *((value, TypeError, "dictionaries") for value in (None, 3, "text", b"text")),
    ],
)
def test_what_cannot_be_turned_back_is_named(batch: Any, error: type[Exception], says: str) -> None:
    with fails_with(error, says):
        items_of(batch)


def test_only_loaders_that_collate_give_mappings_of_columns() -> None:
    assert gives_columns(loader())
    assert not gives_columns(DataLoader(ITEMS, batch_size=None))  # type: ignore[arg-type]
    assert not gives_columns(ITEMS)
    # One item, as the script's own collation gives it.
    own = DataLoader(ITEMS, batch_size=1, collate_fn=lambda items: items[0])  # type: ignore[arg-type]
    assert not gives_columns(own)
