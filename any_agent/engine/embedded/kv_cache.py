"""The key/value cache: one row per running request, each row with its own length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_COLUMN_STEP = 64
PromptStates: TypeAlias = list[tuple[Tensor, Tensor]]
"""Each layer's keys and values of one prompt, [heads, columns, dim]."""


class KVCacheLayer(DynamicLayer):  # type: ignore[misc]
    """One model layer's keys and values, each [rows, heads, columns, dim].

    Buffers are zeroed, not empty: a masked column still enters the product with weight 0, and
    0 * NaN would spoil the row.
    """

    keys: Tensor | None
    values: Tensor | None

    def __init__(self, slots: KVCache) -> None:
        super().__init__()
        self.slots = slots

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        slots = self.slots
        keys = self.keys = _grown(self.keys, key_states, slots)
        values = self.values = _grown(self.values, value_states, slots)
        if slots.prefill_at is not None:
            n, _, length, _ = key_states.shape
            rows = slice(slots.prefill_at, slots.prefill_at + n)
            keys[rows, :, :length] = key_states
            values[rows, :, :length] = value_states
            return key_states, value_states
        n, end = slots.active, slots.longest + 1
        if slots.mask_now is None:  # all rows are equally long
            keys[:n, :, end - 1] = key_states[:, :, 0]
            values[:n, :, end - 1] = value_states[:, :, 0]
        else:
            keys[slots.row_index, :, slots.length_index] = key_states[:, :, 0]
            values[slots.row_index, :, slots.length_index] = value_states[:, :, 0]
        return keys[:n, :, :end], values[:n, :, :end]

    def get_seq_length(self) -> int:
        return 0 if self.slots.prefill_at is not None else self.slots.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def _grown(old: Tensor | None, like: Tensor, slots: KVCache) -> Tensor:
    if old is not None and old.shape[0] == slots.rows and old.shape[2] == slots.columns:
        return old
    new = like.new_zeros((slots.rows, like.shape[1], slots.columns, like.shape[3]))
    if old is not None:
        rows, columns = min(old.shape[0], slots.rows), min(old.shape[2], slots.columns)
        new[:rows, :, :columns] = old[:rows, :, :columns]
    return new


def _rounded(columns: int) -> int:
    return -(-columns // _COLUMN_STEP) * _COLUMN_STEP


class KVCache:
    """The rows of all layers; rows 0 .. ``active`` - 1 are in use, in the running batch's order.

    The model gets ``kv`` as ``past_key_values``. ``max_tokens`` bounds rows x columns, as long as
    the rows in use fit. All methods run in the loop's thread.
    """

    def __init__(
        self, layers: int, dtype: torch.dtype, device: torch.device, max_tokens: int | None = None
    ) -> None:
        self.max_tokens = max_tokens
        self.kv = Cache(layers=[KVCacheLayer(self) for _ in range(layers)])
        self.dtype = dtype
        self.device = device
        self.clear()

    def clear(self) -> None:
        """Free all memory; call it only without active rows."""
        for layer in self.kv.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False
        self.rows = self.columns = self.active = self.longest = 0
        self.lengths: list[int] = []
        self.prefill_at: int | None = None
        # Additive mask [rows, columns]: 0 where a row has a key, the lowest number elsewhere.
        self.mask = torch.empty((0, 0), dtype=self.dtype, device=self.device)
        self.mask_now: Tensor | None = None
        self.row_index = self.length_index = torch.empty(0, dtype=torch.long, device=self.device)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for so many rows and columns; layers grow when they are next written."""
        columns = max(columns, self.longest + 1)
        if rows <= self.rows and columns <= self.columns:
            return
        # Grow in advance, so that a growing row is copied a logarithmic number of times.
        wide = max(columns, self.columns + self.columns // 4) if columns > self.columns else 0
        new_rows, new_columns = max(rows, self.rows), max(_rounded(wide), self.columns)
        if self.max_tokens is not None and new_rows * new_columns > self.max_tokens:
            new_rows = rows
            new_columns = max(columns, min(new_columns, self.max_tokens // rows))
        old, kept_rows, kept = self.mask, min(self.rows, new_rows), min(self.columns, new_columns)
        self.rows, self.columns = new_rows, new_columns
        self.mask = old.new_full((new_rows, new_columns), torch.finfo(self.dtype).min)
        self.mask[:kept_rows, :kept] = old[:kept_rows, :kept]

    def begin_prefill(self, lengths: Sequence[int]) -> None:
        """Prepare for a forward pass that fills new rows, right-padded to the longest."""
        self.reserve(self.active + len(lengths), max(lengths) + 1)
        self.prefill_at = self.active

    def end_prefill(self, lengths: Sequence[int]) -> None:
        """Activate the rows that were just written."""
        self.prefill_at = None
        lowest = torch.finfo(self.dtype).min
        for length in lengths:
            self.mask[self.active, :length] = 0
            self.mask[self.active, length:] = lowest
            self.lengths.append(length)
            self.active += 1
        self._reindex()

    def prompt_states(self, row: int, length: int) -> PromptStates:
        """Return a view of the first ``length`` columns of a row."""
        layers = self.kv.layers
        return [(each.keys[row, :, :length], each.values[row, :, :length]) for each in layers]

    def add_prompt(self, states: PromptStates, length: int) -> None:
        """Activate a new row with a copy of these states."""
        self.reserve(self.active + 1, length + 1)
        for layer, (keys, values) in zip(self.kv.layers, states, strict=True):
            # All layers may have been freed since.
            layer.keys = _grown(layer.keys, keys[None], self)
            layer.values = _grown(layer.values, values[None], self)
            layer.keys[self.active, :, :length] = keys
            layer.values[self.active, :, :length] = values
        self.end_prefill([length])

    def begin_decode(self) -> Tensor | None:
        """Prepare for a forward pass that adds one column to each active row.

        Returns the additive mask [active, 1, 1, longest + 1], or None if all rows are equally long
        and need none.
        """
        self.reserve(self.active, self.longest + 1)
        if min(self.lengths) == self.longest:
            self.mask[: self.active, self.longest] = 0
            self.mask_now = None
        else:
            self.mask[self.row_index, self.length_index] = 0
            self.mask_now = self.mask[: self.active, None, None, : self.longest + 1]
        return self.mask_now

    def end_decode(self) -> None:
        self.lengths = [n + 1 for n in self.lengths]
        self.longest += 1
        self.length_index = self.length_index + 1

    def drop(self, row: int, *, wipe: bool = False) -> None:
        """Free a row; the last one moves into its place. ``wipe`` a row that may have NaN."""
        last = self.active - 1
        end = self.lengths[last]
        for layer in self.kv.layers:
            if wipe:
                layer.keys[row] = 0
                layer.values[row] = 0
            if row != last:
                layer.keys[row, :, :end] = layer.keys[last, :, :end]
                layer.values[row, :, :end] = layer.values[last, :, :end]
        if row != last:
            self.mask[row] = self.mask[last]
            self.lengths[row] = end
        self.lengths.pop()
        self.active = last
        self._reindex()

    def _reindex(self) -> None:
        self.longest = max(self.lengths, default=0)
        self.row_index = torch.arange(self.active, device=self.device)
        self.length_index = torch.tensor(self.lengths, dtype=torch.long, device=self.device)
