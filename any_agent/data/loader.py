"""Batches of a dataset's items, pass after pass, for ``prepare_batch``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from any_agent.data.cursor import DatasetCursor
from any_agent.data.rows import DataRow, as_dataset


class ItemLoader:
    """Lists of ``batch_size`` items. Each iteration is one pass, in an order of its own.

    The last list of a pass may be shorter. Like a stateful data loader it tells where it is
    (:meth:`state_dict`), and goes on there (:meth:`load_state_dict`).
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: it must be at least 1")
        self.dataset = as_dataset(dataset, "dataset")
        self.batch_size = batch_size
        self._positions = DatasetCursor(len(self.dataset), seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Lists in one pass."""
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[list[DataRow]]:
        left = len(self.dataset) - self._positions.state()["low"] % len(self.dataset)
        while left:
            taken = list(islice(self._positions, min(left, self.batch_size)))
            left -= len(taken)
            self._positions.consumed(position for position, _ in taken)
            yield [self.dataset[index] for _, index in taken]

    def state_dict(self) -> dict[str, Any]:
        """Plain data: after which item it stands."""
        return self._positions.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the item at which :meth:`state_dict` was called."""
        self._positions.load(state)
