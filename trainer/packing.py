"""The forward passes of a step: rows that are padded or share prefixes, and their trained tokens.

A :class:`Pass` is what one forward pass computes: padded rows, or the distinct tokens of a prefix
tree of rows, and the items of the loss, one for each trained token of each row.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trainer.rows import Batch, Row, TrainedTokens, concat_padded_tensors, trained_tokens
from trainer.trie import Block, common_prefix, plan_passes, trie_of, whole_pass


def micro_batches(rows: Sequence[Row], token_budget: int) -> list[Batch]:
    """Split rows into batches of at most ``token_budget`` padded tokens, longest first.

    Sorted by length, so that little is padded; longest first, so that memory runs out at once or
    never. Rows with nothing to train on are left out. A row above the budget stands alone: it is
    never cut.
    """
    if token_budget < 1:
        raise ValueError("the token budget must be positive")
    wanted = [row for row in rows if bool(row["loss_mask"].any())]
    wanted.sort(key=lambda row: row["input_ids"].shape[0], reverse=True)
    out: list[list[Row]] = []
    for row in wanted:
        if out and (len(out[-1]) + 1) * out[-1][0]["input_ids"].shape[0] <= token_budget:
            out[-1].append(row)
        else:
            out.append([row])
    return [concat_padded_tensors(part) for part in out]


def balanced(rows: Sequence[Row], parts: int) -> list[list[Row]]:
    """Divide rows so that each part has about as many tokens; those without a loss are left out.

    Equal rows keep their order, so the same rows are always divided alike.
    """
    wanted = [row for row in rows if bool(row["loss_mask"].any())]
    shares = dealt([row["input_ids"].shape[0] for row in wanted], parts)
    return [[wanted[k] for k in share] for share in shares]


def balanced_tries(rows: Sequence[Row], parts: int, token_budget: int) -> list[list[Row]]:
    """Divide rows as :func:`balanced`, those with a common prefix together as far as possible.

    Rows of which each continues the one before it are never divided: a part may get none.
    """
    wanted = sum(bool(row["loss_mask"].any()) for row in rows)
    tries = shared_parts(rows, token_budget)
    while len(tries) < min(parts, wanted) and token_budget:
        token_budget = token_budget // 2
        tries = shared_parts(rows, token_budget)
    shares = dealt([_distinct(one) for one in tries], parts)
    return [[row for k in share for row in tries[k]] for share in shares]


def _distinct(rows: Sequence[Row]) -> int:
    """Return the number of distinct tokens of rows that are sorted by their tokens."""
    ids = [np.zeros(0, dtype=np.int32), *(row["input_ids"].numpy() for row in rows)]
    return sum(len(row) - common_prefix(before, row) for before, row in pairwise(ids))


def dealt(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Divide numbered things so that each part weighs about as much.

    Each, the heaviest first, goes to the part with the least weight so far: no part exceeds the
    best possible division by more than a third (R. L. Graham, 1969).
    """
    out: list[list[int]] = [[] for _ in range(parts)]
    load = [(0, part) for part in range(parts)]
    for k in sorted(range(len(weights)), key=lambda k: -weights[k]):
        weight, part = heapq.heappop(load)
        out[part].append(k)
        heapq.heappush(load, (weight + weights[k], part))
    return out


def idle_batch() -> Batch:
    """Return the smallest batch, for a process that has no rows left while others have some.

    Of its two tokens one is trained, so that every parameter takes part; the loss does not count.
    """
    return {
        "input_ids": torch.zeros(1, 2, dtype=torch.int32),
        "loss_mask": torch.tensor([[0, 1]], dtype=torch.int32),
        "attention_mask": torch.ones(1, 2, dtype=torch.bool),
        "temperatures": torch.ones(1),
        "sequences": torch.zeros(1, dtype=torch.int64),
    }


@dataclass(frozen=True, slots=True)
class Items:
    """The n trained tokens of a pass, with the inputs of the loss; all tensors have shape [n].

    Several items may be predicted from one token: rows that share a prefix may even share their
    trained tokens, and each keeps its own inputs.
    """

    sources: Tensor
    """int64: the tokens of the pass that predict the items, counted through all its rows."""
    labels: Tensor
    """int64: the token ids of the items."""
    sequences: Tensor
    """int64: the row of each item within the step."""
    positions: Tensor
    """int64: the place of each item in its row."""
    temperatures: Tensor
    inputs: dict[str, Tensor]
    """The rows' floating-point tensors at the items, by name; empty in an idle pass."""

    def __len__(self) -> int:
        return self.labels.numel()

    def place(self, k: int) -> str:
        """Return the place of item k for an error message."""
        return f"row {int(self.sequences[k])}, position {int(self.positions[k])}"

    def to(self, device: torch.device) -> Items:
        """Return the items on a device."""
        return Items(
            self.sources.to(device),
            self.labels.to(device),
            self.sequences.to(device),
            self.positions.to(device),
            self.temperatures.to(device),
            {name: tensor.to(device) for name, tensor in self.inputs.items()},
        )

    def at(self, places: Tensor, sources: Tensor) -> Items:
        """Return some of the items, predicted from the ``sources``."""
        return Items(
            sources,
            self.labels[places],
            self.sequences[places],
            self.positions[places],
            self.temperatures[places],
            {name: tensor[places] for name, tensor in self.inputs.items()},
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """The work of one forward pass: rows padded on the right, or nodes of a trie.

    The nodes are one sequence, each token at its ``depths``, and attend by ``blocks``; passes whose
    ``parent`` this one is attend to its keys and values too.
    """

    ids: Tensor
    """int64 [rows, seq_len], or [1, tokens]."""
    items: Items
    depths: Tensor | None = None
    """int64 [1, tokens]; None for padded rows."""
    blocks: Sequence[Block] = ()
    parent: int = -1
    keeps: bool = False
    """Other passes have this one as their parent."""
    row_tokens: int = 0
    """Tokens of the rows; the first pass of a trie has those of all."""

    def to(self, device: torch.device) -> Pass:
        """Return the pass on a device."""
        depths = None if self.depths is None else self.depths.to(device)
        return replace(self, ids=self.ids.to(device), items=self.items.to(device), depths=depths)


def padded_pass(batch: Batch) -> Pass:
    """Return the pass over a padded batch; rows are counted, unless they are :func:`numbered`."""
    tokens = trained_tokens(batch)
    ids = batch["input_ids"]
    numbers = batch.get("sequences", torch.arange(ids.shape[0], device=ids.device))
    temperatures = tokens.spread(batch["temperatures"])
    _require_sampled(temperatures)
    idle = "logprobs" not in batch
    inputs = {
        name: tokens.gather(tensor) if tensor.ndim > 1 else tokens.spread(tensor)
        for name, tensor in batch.items()
        if tensor.is_floating_point() and not idle
    }
    items = Items(
        tokens.rows * ids.shape[1] + tokens.sources,
        tokens.labels,
        tokens.spread(numbers),
        tokens.positions,
        temperatures,
        inputs,
    )
    row_tokens = 0 if idle else int(batch["attention_mask"].sum())
    return Pass(ids.long(), items, row_tokens=row_tokens)


def padded_passes(rows: Sequence[Row], token_budget: int) -> list[Pass]:
    """Return the passes over padded rows, as :func:`micro_batches` divides them."""
    return [padded_pass(batch) for batch in micro_batches(numbered(rows), token_budget)]


def numbered(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their numbers, ``sequences``, which they keep in any division."""
    return [row | {"sequences": torch.tensor(k)} for k, row in enumerate(rows)]


def tree_passes(rows: Sequence[Row], token_budget: int, *, divided: bool = True) -> list[Pass]:
    """Return passes that compute every distinct token of the rows' prefixes once.

    ``divided`` passes run along the branches of the trie and have at most ``token_budget`` tokens
    each, with the ancestors that they attend to, or half of that beside long ancestors. Otherwise
    there is one pass. Rows with nothing to train on are left out; items are ordered by their place
    in the trie. Rows are counted, unless they are :func:`numbered`.
    """
    wanted = [k for k, row in enumerate(rows) if bool(row["loss_mask"].any())]
    if not wanted:
        return []
    tokens = [trained_tokens({n: t[None] for n, t in rows[k].items()}) for k in wanted]
    trie = trie_of(
        [rows[k]["input_ids"].numpy() for k in wanted],
        [one.positions.numpy() for one in tokens],
        [tie(rows[k]) for k in wanted],
        longest_node=max(token_budget // 2, 1) if divided else None,
    )
    plan = plan_passes(trie, token_budget) if divided else [whole_pass(trie)]
    numbers = [int(rows[k].get("sequences", k)) for k in wanted]
    items = _items([(numbers[k], rows[wanted[k]], tokens[k]) for k in trie.order])
    home, local = np.zeros_like(trie.tokens), np.zeros_like(trie.tokens)
    members = []
    for number, one in enumerate(plan):
        nodes = [np.arange(trie.bounds[n], trie.bounds[n + 1]) for n in one.nodes]
        members.append(np.concatenate(nodes))
        home[members[-1]], local[members[-1]] = number, np.arange(len(members[-1]))
    sources = np.concatenate(trie.sources)
    order = np.lexsort((sources, home[sources]))
    ends = np.searchsorted(home[sources][order], np.arange(len(plan) + 1))
    parents = {one.parent for one in plan}
    out = []
    for number, one in enumerate(plan):
        places = order[ends[number] : ends[number + 1]]
        out.append(
            Pass(
                torch.from_numpy(trie.tokens[members[number]])[None],
                items.at(torch.from_numpy(places), torch.from_numpy(local[sources[places]])),
                torch.from_numpy(trie.depths[members[number]])[None],
                one.blocks,
                one.parent,
                number in parents,
                0 if number else sum(rows[k]["input_ids"].shape[0] for k in wanted),
            )
        )
    return out


def _items(rows: Sequence[tuple[int, Row, TrainedTokens]]) -> Items:
    """Return the items of numbered rows, one row after the other, without their sources."""
    names = {name for name, tensor in rows[0][1].items() if tensor.is_floating_point()}
    for _, row, _ in rows:
        if odd := names ^ {name for name, tensor in row.items() if tensor.is_floating_point()}:
            raise ValueError(f"{', '.join(sorted(odd))} is missing in some rows")
    inputs = {}
    for name in sorted(names):
        given = [
            row[name][tokens.positions] if row[name].ndim else row[name].expand(len(tokens))
            for _, row, tokens in rows
        ]
        inputs[name] = torch.cat(given)
    _require_sampled(inputs["temperatures"])
    places = torch.cat([tokens.positions for _, _, tokens in rows])
    return Items(
        places - 1,
        torch.cat([tokens.labels for _, _, tokens in rows]),
        torch.cat([torch.full((len(tokens),), number) for number, _, tokens in rows]),
        places,
        inputs["temperatures"],
        inputs,
    )


def tie(row: Row) -> bytes:
    """Return the inputs of the loss, which order rows with the same tokens."""
    named = sorted(row.items())
    return b"".join(t.contiguous().numpy().tobytes() for _, t in named if t.is_floating_point())


def _require_sampled(temperatures: Tensor) -> None:
    if not bool((temperatures > 0).all()):
        raise ValueError("temperatures must be positive: greedy tokens cannot be trained on")


def shared_parts(rows: Sequence[Row], token_budget: int) -> list[list[Row]]:
    """Divide rows into parts of at most ``token_budget`` distinct tokens, neighbours together.

    Rows are sorted by their tokens, so that those with a common prefix are neighbours. A part with
    a row above the budget has as many distinct tokens as that row: the row, and the rows that it
    continues. Rows with nothing to train on are left out.
    """
    wanted = [row for row in rows if bool(row["loss_mask"].any())]
    keys = [(row["input_ids"].numpy().astype(">u4").tobytes(), tie(row)) for row in wanted]
    parts: list[list[Row]] = []
    total, previous = 0, np.zeros(0, dtype=np.int32)
    for k in sorted(range(len(wanted)), key=keys.__getitem__):
        ids = wanted[k]["input_ids"].numpy()
        fresh = len(ids) - common_prefix(previous, ids)
        if not parts or total + fresh > max(token_budget, len(ids)):
            parts.append([])
            total, fresh = 0, len(ids)
        parts[-1].append(wanted[k])
        total, previous = total + fresh, ids
    return parts
