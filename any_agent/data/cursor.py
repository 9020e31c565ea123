"""The order of a dataset's items over passes and restarts, and batches of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from any_agent.data.rows import DataRow, as_dataset
from any_agent.errors import ConfigError
from any_agent.protocol.tasks import MOST_RESTS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class DatasetCursor:
    """A counter through passes over ``length`` items: position p is an item of pass p // length.

    Iterating yields ``(position, index of the item)`` for positions that are neither consumed nor
    handed out yet. ``shuffle`` draws each pass's order from ``seed`` and the pass's number; without
    ``epochs`` there is always another pass. A checkpoint stores :meth:`state`: after :meth:`load`,
    positions that were handed out but not consumed come again, consumed ones never. One thread may
    iterate while another one consumes.

    An item that was :meth:`judged` dull, n times in a row, rests for the next 2**n - 1 passes, 7 at
    most: its positions there are consumed without being handed out.
    """

    def __init__(
        self, length: int, *, seed: int = 0, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        if length < 1:
            raise ConfigError("the dataset is empty: there is nothing to train on")
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.end = None if epochs is None else epochs * length
        """One more than the last position; None for no end."""
        self._next = 0
        self._low = 0
        self._beyond: set[int] = set()
        """Consumed positions above the low-water mark; all positions below it are consumed."""
        self._dull: dict[int, tuple[int, int]] = {}
        """By item: how often in a row it was dull, and the last pass in which it was."""
        self._lock = threading.Lock()
        self._order = lru_cache(maxsize=2)(self._drawn)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self

    def __next__(self) -> tuple[int, int]:
        with self._lock:
            while True:
                while self._next in self._beyond:
                    self._next += 1
                position = self._next
                if self.end is not None and position >= self.end:
                    raise StopIteration
                self._next += 1
                index = self.index(position)
                if not self._rests(index, position // self.length):
                    return position, index
                self._consume((position,))

    @property
    def epoch(self) -> float:
        """Number of consumed passes, up to the first item that is not consumed."""
        return self._low / self.length

    @property
    def done(self) -> int:
        """Number of consumed positions."""
        with self._lock:
            return self._low + len(self._beyond)

    @property
    def left_in_pass(self) -> int:
        """Number of items of the first unfinished pass that are not consumed."""
        with self._lock:
            end = (self._low // self.length + 1) * self.length
            return end - self._low - sum(position < end for position in self._beyond)

    def index(self, position: int) -> int:
        """Return the item at a position, 0 to ``length`` - 1."""
        epoch, place = divmod(position, self.length)
        return int(self._order(epoch)[place]) if self.shuffle else place

    def consumed(self, positions: int | Iterable[int]) -> None:
        """Record positions that were trained on or given up, which never come again; idempotent."""
        several = [positions] if isinstance(positions, int) else positions
        with self._lock:
            self._consume(several)

    def judged(self, position: int, *, dull: bool) -> None:
        """Record whether an item taught nothing in the pass of this position; idempotent."""
        item, now = self.index(position), position // self.length
        with self._lock:
            times, last = self._dull.get(item, (0, -1))
            if now <= last:
                return
            if dull:
                self._dull[item] = times + 1, now
            else:
                self._dull.pop(item, None)

    @property
    def resting(self) -> int:
        """Number of items that rest in the pass of the next position."""
        with self._lock:
            now = self._next // self.length
            return sum(self._rests(item, now) for item in self._dull)

    def _resting_state(self) -> dict[str, Any]:
        """Return what was judged dull, for :meth:`state`; nothing where no item rests."""
        if not self._dull:
            return {}
        return {"dull": [[item, *found] for item, found in sorted(self._dull.items())]}

    def _rests(self, item: int, now: int) -> bool:
        if not (found := self._dull.get(item)):
            return False
        times, last = found
        return last < now < last + (1 << min(times, MOST_RESTS))

    def _consume(self, positions: Iterable[int]) -> None:
        self._beyond.update(position for position in positions if position >= self._low)
        while self._low in self._beyond:
            self._beyond.remove(self._low)
            self._low += 1
        self._next = max(self._next, self._low)

    def requeue(self) -> None:
        """Hand out again every position that was not consumed."""
        with self._lock:
            self._next = self._low

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint; its size depends on what is consumed out of order."""
        with self._lock:
            return {
                "length": self.length,
                "seed": self.seed,
                "shuffle": self.shuffle,
                "low": self._low,
                "beyond": sorted(self._beyond),
                **self._resting_state(),
            }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state`, in its order.

        A state with ``beyond`` alone lists the consumed positions and keeps this cursor's order.
        Raises ConfigError if the dataset has another length.
        """
        if state.get("length", self.length) != self.length:
            raise ConfigError(
                f"the dataset has {self.length} items, and had {state['length']} when this trial's "
                "checkpoint was written: its items would be mistaken for others. Train on the same "
                "dataset, or start another trial"
            )
        with self._lock:
            self.seed = state.get("seed", self.seed)
            self.shuffle = state.get("shuffle", self.shuffle)
            self._order.cache_clear()
            self._low, self._beyond = state.get("low", 0), set()
            self._dull = {item: (times, last) for item, times, last in state.get("dull", ())}
        self.consumed(state["beyond"])
        self.requeue()

    def _drawn(self, epoch: int) -> npt.NDArray[np.int64]:
        # The light installation reads datasets, too, and has no numpy.
        import numpy as np

        # numpy promises that the numbers of RandomState never change.
        words = [self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF, epoch]
        return np.random.RandomState(words).permutation(self.length)


class ItemLoader:
    """Lists of ``batch_size`` items for ``prepare_batch``; each iteration is one pass.

    Each pass has its own order, and its last list may be shorter. :meth:`state_dict` returns which
    items are done, and :meth:`load_state_dict` continues with the others: an item is done when
    iterating has yielded it, or when ``prepare_batch`` has returned or rejected its episodes.
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
        """Return the number of lists in one pass."""
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[list[DataRow]]:
        left = self._positions.left_in_pass
        while left:
            taken = list(islice(self._positions, min(left, self.batch_size)))
            left -= len(taken)
            self.consumed(position for position, _ in taken)
            yield [self.dataset[index] for _, index in taken]

    def ahead(self) -> Iterator[tuple[int, DataRow]]:
        """Return positions and items, pass after pass, from the first item that is not done.

        They are done once the caller reports their positions by :meth:`consumed`.
        """
        positions = DatasetCursor(len(self.dataset))
        positions.load(self._positions.state())
        return ((position, self.dataset[index]) for position, index in positions)

    def consumed(self, positions: int | Iterable[int]) -> None:
        """Record items that are done, by their positions."""
        self._positions.consumed(positions)

    def state_dict(self) -> dict[str, Any]:
        """Return which items are done, as plain data."""
        return self._positions.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the items that were not done at :meth:`state_dict`, in its order.

        To be called before ``prepare_batch``, which runs ahead.
        """
        self._positions.load(state)
