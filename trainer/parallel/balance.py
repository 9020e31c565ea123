"""Which process trains on which rows: the same work for all, in equally many passes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch

from trainer.packing import Batch, Row


def balanced(rows: Sequence[Row], parts: int) -> list[list[Row]]:
    """Divide rows so that each part has about as many tokens; those without a loss are left out.

    The longest row goes to the part with the fewest tokens so far, and so on: no part has more than
    a third above what the best division could do (R. L. Graham, 1969). Equal rows keep their order,
    so the same rows are always divided alike.
    """
    wanted = [row for row in rows if bool(row["loss_mask"].any())]
    wanted.sort(key=lambda row: row["input_ids"].shape[0], reverse=True)
    out: list[list[Row]] = [[] for _ in range(parts)]
    load = [(0, part) for part in range(parts)]
    for row in wanted:
        tokens, part = heapq.heappop(load)
        out[part].append(row)
        heapq.heappush(load, (tokens + row["input_ids"].shape[0], part))
    return out


def idle_batch() -> Batch:
    """The smallest batch there is, to go through the motions with while others have work.

    Two tokens, one of them trained, so that every parameter takes part; its loss is not counted.
    """
    return {
        "input_ids": torch.zeros(1, 2, dtype=torch.int32),
        "loss_mask": torch.tensor([[0, 1]], dtype=torch.int32),
        "attention_mask": torch.ones(1, 2, dtype=torch.bool),
        "temperatures": torch.ones(1),
    }
