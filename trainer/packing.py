"""The forward passes of a step: rows that are padded or share prefixes, and their trained tokens.

A :class:`Pass` is what one forward pass computes: padded rows, or the distinct tokens of a prefix
tree of rows, and the items of the loss, one for each trained token of each row.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.rows import Row, at_trained, is_trained, trained_positions
from trainer.trie import Block, NodePass, Trie, common_prefix, plan_passes, trie_of

Shape: TypeAlias = Sequence[int]
"""The number of each pass's parent, -1 without one; a parent precedes its children."""

_UNEVEN = 1.1
"""A process with this many times its share of the tokens is worth dividing rows for."""


def micro_batches(rows: Sequence[Row], token_budget: int) -> list[list[int]]:
    """Return the numbers of the rows of each batch of at most ``token_budget`` padded tokens.

    Sorted by length, so that little is padded; longest first, so that memory runs out at once or
    never. Rows with nothing to train on are left out. A row above the budget stands alone: it is
    never cut.
    """
    if token_budget < 1:
        raise ValueError("the token budget must be positive")
    lengths = [len(row["input_ids"]) for row in rows]
    wanted = [k for k, row in enumerate(rows) if is_trained(row)]
    out: list[list[int]] = []
    for k in sorted(wanted, key=lambda k: -lengths[k]):
        if out and (len(out[-1]) + 1) * lengths[out[-1][0]] <= token_budget:
            out[-1].append(k)
        else:
            out.append([k])
    return out


def balanced(rows: Sequence[Row], parts: int) -> list[list[Row]]:
    """Divide rows so that each part has about as many tokens; those without a loss are left out.

    Equal rows keep their order, so the same rows are always divided alike.
    """
    wanted = [row for row in rows if is_trained(row)]
    shares = dealt([row["input_ids"].shape[0] for row in wanted], parts)
    return [[wanted[k] for k in share] for share in shares]


def balanced_tries(rows: Sequence[Row], parts: int) -> list[list[Row]]:
    """Divide rows so that each part has about as many distinct tokens, and few are in two parts.

    Rows with a common prefix are divided where that shortens the longest part by more than the
    prefix; so rows of which each continues the one before it never are, and a part may get none.
    Those without a loss are left out.
    """
    # Those with a common prefix are neighbours.
    ordered = sorted(
        (row for row in rows if is_trained(row)),
        key=lambda row: (row["input_ids"].numpy().astype(">u4").tobytes(), tie(row)),
    )
    runs = _Runs([row["input_ids"].numpy() for row in ordered])
    units, tried = [(0, len(ordered))], []
    for limit in (runs.weight(0, len(ordered)) / parts / k for k in (1, 2, 4, 8)):
        units = [piece for unit in units for piece in runs.divided(*unit, limit)]
        weights = [runs.weight(*unit) for unit in units]
        shares = dealt(weights, parts)
        longest = max(sum(weights[k] for k in share) for share in shares)
        tried.append((longest, [[units[k] for k in share] for share in shares]))
        if longest <= _UNEVEN * sum(weights) / parts:
            break
    _, best = min(tried, key=lambda one: one[0])
    return [[row for start, end in share for row in ordered[start:end]] for share in best]


class _Runs:
    """Runs of neighbours among rows that are sorted by their tokens."""

    def __init__(self, ids: Sequence[npt.NDArray[np.int32]]) -> None:
        none = np.zeros(0, dtype=np.int32)
        self._shared = np.array([common_prefix(*two) for two in pairwise([none, *ids])], dtype=int)
        fresh = np.array([len(row) for row in ids], dtype=int) - self._shared
        self._total = np.concatenate([[0], fresh.cumsum()])
        """The distinct tokens of the rows before each."""

    def weight(self, start: int, end: int) -> int:
        """Return the number of distinct tokens of a run."""
        whole = int(self._total[end] - self._total[start])
        return whole + int(self._shared[start]) if start < end else 0

    def divided(self, start: int, end: int, limit: float) -> list[tuple[int, int]]:
        """Divide a run of more distinct tokens than the limit, and its parts, where it helps."""
        out, todo = [], [(start, end)]
        while todo:
            start, end = todo.pop()
            weight = self.weight(start, end)
            cuts = np.arange(start + 1, end)
            if weight > limit and len(cuts):
                left = self._total[cuts] - self._total[start] + self._shared[start]
                right = self._total[end] - self._total[cuts] + self._shared[cuts]
                costs = np.maximum(left, right) + self._shared[cuts]
                best = int(costs.argmin())
                if costs[best] < weight:
                    cut = int(cuts[best])
                    todo += [(cut, end), (start, cut)]
                    continue
            out.append((start, end))
        return out


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
        return self._each(lambda tensor: tensor.to(device))

    def at(self, places: Tensor, sources: Tensor) -> Items:
        """Return some of the items, predicted from the ``sources``."""
        return replace(self._each(lambda tensor: tensor[places]), sources=sources)

    def _each(self, work: Callable[[Tensor], Tensor]) -> Items:
        every = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "inputs"}
        inputs = {name: work(tensor) for name, tensor in self.inputs.items()}
        return Items(**{name: work(tensor) for name, tensor in every.items()}, inputs=inputs)


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
    around: int = -1
    """The pass between whose forward and backward computation this one runs: its parent, or
    another one where processes share an order of computations."""
    keeps: bool = False
    """Other passes run before this one's backward computation."""
    row_tokens: int = 0
    """Tokens of the rows; the first pass of a trie has those of all."""

    def to(self, device: torch.device) -> Pass:
        """Return the pass on a device."""
        depths = None if self.depths is None else self.depths.to(device)
        return replace(self, ids=self.ids.to(device), items=self.items.to(device), depths=depths)


def padded_passes(rows: Sequence[Row], token_budget: int) -> list[Pass]:
    """Return the passes over padded rows, as :func:`micro_batches` divides them."""
    out = []
    for numbers in micro_batches(rows, token_budget):
        given = [rows[k]["input_ids"] for k in numbers]
        ids = pad_sequence(given, batch_first=True)
        items = _items(rows, numbers, ids.shape[1])
        out.append(Pass(ids.long(), items, row_tokens=sum(map(len, given))))
    return out


def idle_pass() -> Pass:
    """Return the smallest pass, for a process that has none left while others have some.

    One of its two tokens is predicted, so that every parameter takes part; the loss does not count.
    """
    one = torch.zeros(1, dtype=torch.int64)
    return Pass(one.new_zeros(1, 2), Items(one, one, one, one + 1, torch.ones(1), {}))


def tree_passes(rows: Sequence[Row], token_budget: int) -> list[Pass]:
    """Return passes that compute every distinct token of the rows' prefixes once.

    They run along the branches of the trie and have at most ``token_budget`` tokens each, with the
    ancestors that they attend to, or half of that beside long ancestors. Rows with nothing to train
    on are left out; items are ordered by their place in the trie.
    """
    wanted = [k for k, row in enumerate(rows) if is_trained(row)]
    if not wanted:
        return []
    trie, plan = _planned([rows[k] for k in wanted], token_budget)
    items = _items(rows, [wanted[k] for k in trie.order])
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
                one.parent,
                number in parents,
                0 if number else sum(rows[k]["input_ids"].shape[0] for k in wanted),
            )
        )
    return out


def tree_shape(rows: Sequence[Row], token_budget: int) -> Shape:
    """Return the shape of what :func:`tree_passes` returns."""
    _, plan = _planned([row for row in rows if is_trained(row)], token_budget)
    return [one.parent for one in plan]


def _planned(rows: Sequence[Row], token_budget: int) -> tuple[Trie, list[NodePass]]:
    trie = trie_of(
        [row["input_ids"].numpy() for row in rows],
        [trained_positions(row).numpy() for row in rows],
        [tie(row) for row in rows],
        longest_node=max(token_budget // 2, 1),
    )
    return trie, plan_passes(trie, token_budget)


def in_common(passes: Sequence[Pass], shapes: Sequence[Shape], own: int) -> list[Pass]:
    """Return one process's ``passes`` in an order of computations that all processes share.

    All gather weights together: each must begin and end its passes when the others do, so their
    trees are laid over each other. Where another process has more, one runs a pass that comes later
    anyway, if no more passes are retained then than the deepest tree needs, or an idle one.
    ``shapes`` are those of all processes' passes, ``own`` is the number of this one.
    """
    places = list(_laid_over(shapes))
    where = {mine[own]: place for place, (_, mine) in enumerate(places)} | {-1: -1}
    around = {outer for outer, _ in places}
    idle = idle_pass()
    out = []
    for place, (outer, mine) in enumerate(places):
        one = passes[mine[own]] if mine[own] >= 0 else idle
        one = one if len(one.items) else replace(one, items=idle.items)
        out.append(replace(one, parent=where[one.parent], around=outer, keeps=place in around))
    return out


def _laid_over(shapes: Sequence[Shape]) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of the place around each place of a common tree, and each process's pass.

    The pass is -1 where a process is idle. What a pass descends from is in a place around it. No
    more places are open at once than the deepest of the trees has.
    """
    trees = [_Descent(shape) for shape in shapes]
    deepest = max((tree.heights[-1] for tree in trees), default=0)
    todo = [[list(tree.children[-1]) for tree in trees]]
    """For each open place and process: the passes that descend from its pass, and are to come."""
    opened, count = [-1], 0
    while todo:
        if not any(todo[-1]):
            todo.pop()
            opened.pop()
            continue
        room = deepest - len(todo)
        mine = [
            tree.taken((one[own] for one in reversed(todo)), room) for own, tree in enumerate(trees)
        ]
        yield opened[-1], mine
        below = zip(trees, mine, strict=True)
        todo.append([list(tree.children[k]) if k >= 0 else [] for tree, k in below])
        opened.append(count)
        count += 1


class _Descent:
    """A shape from its roots down: the children of each pass, those of entry -1 being the roots."""

    def __init__(self, shape: Shape) -> None:
        self.heights = [1] * len(shape) + [0]
        """The passes on the longest way from each down, itself included."""
        sizes = [1] * (len(shape) + 1)
        self.children: list[list[int]] = [[] for _ in range(len(shape) + 1)]
        for number in range(len(shape) - 1, -1, -1):
            parent = shape[number]
            self.children[parent].append(number)
            sizes[parent] += sizes[number]
            itself = 1 if parent >= 0 else 0
            self.heights[parent] = max(self.heights[parent], self.heights[number] + itself)
        for of_one in self.children:
            of_one.sort(key=lambda k: (-self.heights[k], -sizes[k], k))

    def taken(self, waiting: Iterable[list[int]], room: int) -> int:
        """Take the highest pass with at most ``room`` below it, from the first list with one; -1
        without any."""
        for passes in waiting:
            first = bisect_left(passes, -room - 1, key=lambda k: -self.heights[k])
            if first < len(passes):
                return passes.pop(first)
        return -1


def require_inputs(rows: Sequence[Row]) -> None:
    """Raise ValueError for rows of which some lack an input of the loss, or that are greedy."""
    known: set[str] = set()
    for number, row in enumerate(rows):
        names = {name for name, tensor in row.items() if tensor.is_floating_point()}
        known = known if number else names
        if odd := known ^ names:
            raise ValueError(f"{', '.join(sorted(odd))} is missing in some rows")
        if not bool((row["temperatures"] > 0).all()):
            raise ValueError("temperatures must be positive: greedy tokens cannot be trained on")


def _items(rows: Sequence[Row], numbers: Sequence[int], width: int = 0) -> Items:
    """Return the items of these rows, one row after the other.

    Their sources are counted in their own row, or through rows of this ``width``.
    """
    require_inputs([rows[k] for k in numbers])
    places = [trained_positions(rows[k]) for k in numbers]
    given = [at_trained(rows[k], own) for k, own in zip(numbers, places, strict=True)]
    inputs = {name: torch.cat([one[name] for one in given]) for name in sorted(given[0])}
    labels = [rows[k]["input_ids"][own].long() for k, own in zip(numbers, places, strict=True)]
    return Items(
        torch.cat([own - 1 + place * width for place, own in enumerate(places)]),
        torch.cat(labels),
        torch.cat([torch.full_like(own, k) for k, own in zip(numbers, places, strict=True)]),
        torch.cat(places),
        inputs["temperatures"],
        inputs,
    )


def tie(row: Row) -> bytes:
    """Return the inputs of the loss, which order rows with the same tokens."""
    named = sorted(row.items())
    return b"".join(t.contiguous().numpy().tobytes() for _, t in named if t.is_floating_point())
