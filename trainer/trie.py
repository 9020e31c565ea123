"""A prefix trie of token rows, and the passes that compute each of its tokens once.

The tokens of a trie are numbered in depth-first order, so that the descendants of a token follow
it without a gap. A node is a chain of tokens without a branch. The order does not depend on the
order of the rows: children are sorted by their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trie:
    """The distinct tokens of some rows. Rows without a common first token have roots of their own.

    Of each row only the tokens before its last trained one take part: nothing else is predicted
    from the others.
    """

    tokens: Ints
    """The token ids, [tokens], depth first."""
    depths: Ints
    """The position of each token in its rows, [tokens]."""
    bounds: Ints
    """Node k has the tokens ``bounds[k]`` to ``bounds[k + 1]``; [nodes + 1]."""
    parents: list[int]
    """The node that each node continues; -1 for a root. A parent precedes its children."""
    order: list[int]
    """The numbers of the rows as the trie has them, sorted by their tokens."""
    sources: list[Ints]
    """For each row in this order, the tokens that its trained tokens are predicted from."""

    @property
    def lengths(self) -> Ints:
        """The number of tokens of each node."""
        return np.diff(self.bounds)


def trie_of(
    rows: Sequence[npt.NDArray[np.int32]],
    trained: Sequence[Ints],
    ties: Sequence[bytes],
    *,
    longest_node: int | None = None,
) -> Trie:
    """Build the trie of rows with their ``trained`` positions, each in ascending order, 1 at least.

    Rows with equal tokens are ordered by ``ties``, and then as given. Nodes of more than
    ``longest_node`` tokens are divided. Time and memory are linear in the rows' tokens.
    """
    used = [row[: places[-1]] for row, places in zip(rows, trained, strict=True)]
    keys = [ids.astype(">u4").tobytes() for ids in used]
    order = sorted(range(len(used)), key=lambda k: (keys[k], ties[k]))
    where = np.zeros(max((len(ids) for ids in used), default=0), dtype=np.int64)
    """The token of the trie at each position of the current row."""
    tokens, depths, sources = [], [], []
    origins: dict[int, int] = {}
    """The tokens that branches continue, by their first tokens; -1 for a root."""
    cuts: set[int] = set()
    total, previous = 0, np.zeros(0, dtype=np.int32)
    for k in order:
        ids = used[k]
        shared = common_prefix(previous, ids)
        fresh = len(ids) - shared
        if fresh:
            origin = int(where[shared - 1]) if shared else -1
            if shared == 0 or origin + 1 != total:
                origins[total] = origin
                cuts |= {total, origin + 1}
            where[shared : len(ids)] = np.arange(total, total + fresh)
            tokens.append(ids[shared:].astype(np.int64))
            depths.append(np.arange(shared, len(ids)))
            total += fresh
        sources.append(where[trained[k] - 1])
        previous = ids
    bounds = _bounds(sorted(cuts | {total}), longest_node)
    # What does not begin a branch continues the node before it. Nothing is before a root.
    before = [origins.get(start, start - 1) for start in bounds[:-1].tolist()]
    parents = (np.searchsorted(bounds, before, side="right") - 1).tolist()
    empty = np.zeros(0, dtype=np.int64)
    return Trie(
        np.concatenate([empty, *tokens]),
        np.concatenate([empty, *depths]),
        bounds,
        parents,
        order,
        sources,
    )


def common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Return the number of leading tokens that both rows have."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if bool(differs.any()) else length


def _bounds(cuts: list[int], longest: int | None) -> Ints:
    if longest is None:
        return np.array(cuts, dtype=np.int64)
    pieces = [np.arange(a, b, longest) for a, b in pairwise(cuts)]
    return np.concatenate([*pieces, np.array(cuts[-1:])]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of a pass and the keys that they attend to.

    ``count`` equal pairs follow each other. Causal blocks are those of a node with itself, and
    queries and keys are the same tokens; else all queries attend to all keys.
    """

    query: int
    queries: int
    key: int
    keys: int
    level: int | None = None
    """The ancestor pass that has the keys, counted from the root; None: the pass itself."""
    causal: bool = False
    count: int = 1


@dataclass(slots=True)
class NodePass:
    """The nodes that one forward pass computes, in depth-first order."""

    nodes: list[int]
    parent: int = -1
    """The pass whose keys and values this one attends to, as to those of its ancestors."""
    blocks: list[Block] = field(default_factory=list)


def plan_passes(trie: Trie, budget: int) -> list[NodePass]:
    """Divide a trie into passes along its branches; each comes after its parent, depth first.

    A pass has at most ``budget`` tokens, with the ancestors that are retained for it if these are
    few. Beside long ancestors it has half of the budget, or what leads no further than the longest
    row, all of which is retained anyway. No node may have more than half of the budget.
    """
    lengths = trie.lengths.tolist()
    sizes = list(lengths)
    children: list[list[int]] = [[] for _ in lengths]
    for node in range(len(lengths) - 1, -1, -1):
        parent = trie.parents[node]
        if parent >= 0:
            sizes[parent] += sizes[node]
            children[parent].append(node)
    ends = (trie.bounds[:-1] + np.array(sizes, dtype=np.int64)).tolist()
    last = np.searchsorted(trie.bounds, ends).tolist()
    roots = [node for node, parent in enumerate(trie.parents) if parent < 0]
    longest = int(trie.depths.max(initial=-1)) + 1
    passes: list[NodePass] = []
    todo: list[tuple[list[int], int, int]] = [(roots, -1, 0)]
    while todo:
        pending, parent, retained = todo.pop()
        limit = max(budget - retained, budget // 2, min(budget, longest - retained), 1)
        for bunch in _first_fit([n for n in pending if sizes[n] <= limit], sizes, limit):
            nodes = [n for top in sorted(bunch) for n in range(top, last[top])]
            passes.append(NodePass(nodes, parent))
        heavy = [n for n in pending if sizes[n] > limit]
        if len(heavy) > 1:
            todo += [([n], parent, retained) for n in reversed(heavy)]
            continue
        taken, rest, total = [], [], 0
        while heavy:
            node = heavy.pop()
            if sizes[node] > limit and total + lengths[node] <= limit:
                taken.append(node)
                total += lengths[node]
                heavy += children[node]
            else:
                rest.append(node)
        if taken:
            passes.append(NodePass(sorted(taken), parent))
            todo.append((sorted(rest), len(passes) - 1, retained + total))
    _lay_out(trie, passes, children)
    return passes


def _first_fit(nodes: list[int], sizes: list[int], limit: int) -> list[list[int]]:
    """Bunch nodes up to the limit, the largest first, each where it fits first."""
    bunches: list[list[int]] = []
    room: list[int] = []
    for node in sorted(nodes, key=lambda n: (-sizes[n], n)):
        k = next((k for k, free in enumerate(room) if sizes[node] <= free), len(room))
        if k == len(room):
            bunches.append([])
            room.append(limit)
        bunches[k].append(node)
        room[k] -= sizes[node]
    return bunches


def _lay_out(trie: Trie, passes: list[NodePass], children: list[list[int]]) -> None:
    """Find the blocks of attention of every pass."""
    lengths = trie.lengths.tolist()
    home = [0] * len(lengths)
    """The pass of each node, and its first token's place there."""
    offset = [0] * len(lengths)
    levels: list[int] = []
    for number, one in enumerate(passes):
        levels.append(levels[one.parent] + 1 if one.parent >= 0 else 0)
        total = 0
        for node in one.nodes:
            home[node], offset[node] = number, total
            total += lengths[node]
    for number, one in enumerate(passes):
        end = {node: offset[node] + lengths[node] for node in one.nodes}
        """The end of each node's descendants in this pass."""
        own = dict(end)
        """The end of each chain, by its first node: a divided node is one again."""
        past: dict[int, list[int]] = {}
        """The queries that descend from a node of an ancestor pass."""
        for node in reversed(one.nodes):
            parent = trie.parents[node]
            if parent >= 0 and home[parent] == number:
                end[parent] = max(end[parent], end[node])
                if len(children[parent]) == 1:
                    own[parent] = own.pop(node)
                continue
            while parent >= 0:
                span = past.setdefault(parent, [offset[node], end[node]])
                span[0] = offset[node]
                parent = trie.parents[parent]
        causal: list[Block] = []
        within: list[Block] = []
        for node in one.nodes:
            if node not in own:
                continue
            start, length = offset[node], own[node] - offset[node]
            if causal and causal[-1].queries == length:
                before = causal[-1]
                causal[-1] = Block(
                    before.query, length, before.key, length, None, True, before.count + 1
                )
            else:
                causal.append(Block(start, length, start, length, None, True))
            if end[node] > own[node]:
                within.append(Block(own[node], end[node] - own[node], start, length))
        one.blocks = causal + within + _past_blocks(past, home, offset, lengths, levels)


def _past_blocks(
    past: dict[int, list[int]],
    home: list[int],
    offset: list[int],
    lengths: list[int],
    levels: list[int],
) -> list[Block]:
    """Return the blocks with keys of ancestor passes; neighbours with the same queries are one."""
    out: list[Block] = []
    for node in sorted(past):
        start, end = past[node]
        level, key = levels[home[node]], offset[node]
        block = Block(start, end - start, key, lengths[node], level)
        if out:
            one = out[-1]
            same = (one.query, one.queries, one.level) == (start, end - start, level)
            if same and one.key + one.keys == key:
                block = Block(start, end - start, one.key, one.keys + lengths[node], level)
                out.pop()
        out.append(block)
    return out
