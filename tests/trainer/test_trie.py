"""A trie has every distinct token once, and its passes compute what each token attends to."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.trie import NodePass, Trie, plan_passes, trie_of

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=12)


def trie(rows: list[list[int]], longest: int | None = None) -> tuple[Trie, list[list[int]]]:
    """Every second token is trained, and the last; the rows as far as they take part."""
    trained = [np.union1d(np.arange(1, len(row), 2), [len(row) - 1]) for row in rows]
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    built = trie_of(arrays, trained, [b""] * len(rows), longest_node=longest)
    for k, sources in zip(built.order, built.sources, strict=True):
        assert [path(built, int(t)) for t in sources] == [rows[k][:p] for p in trained[k]]
    return built, [row[:-1] for row in rows]


def ancestors(built: Trie, token: int) -> list[int]:
    """The token's line, itself last, by the nodes' parents."""
    out = []
    node = int(np.searchsorted(built.bounds, token, side="right")) - 1
    while node >= 0:
        first = int(built.bounds[node])
        out = list(range(first, min(token + 1, int(built.bounds[node + 1])))) + out
        node = built.parents[node]
        token = int(built.bounds[node + 1]) - 1
    return out


def path(built: Trie, token: int) -> list[int]:
    return built.tokens[ancestors(built, token)].tolist()


@settings(deadline=None, max_examples=200)
@given(ROWS, st.integers(1, 6))
def test_every_distinct_prefix_is_one_token(rows: list[list[int]], longest: int) -> None:
    built, used = trie(rows, longest)
    prefixes = {tuple(row[: n + 1]) for row in used for n in range(len(row))}
    found = [tuple(path(built, t)) for t in range(len(built.tokens))]
    assert len(found) == len(prefixes) and set(found) == prefixes
    assert built.depths.tolist() == [len(one) - 1 for one in found]
    assert max(built.lengths) <= longest
    assert all(parent < node for node, parent in enumerate(built.parents))


@settings(deadline=None)
@given(ROWS, st.randoms())
def test_the_order_of_rows_changes_nothing(rows: list[list[int]], chance: object) -> None:
    built, _ = trie(rows)
    shuffled = list(rows)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    again, _ = trie(shuffled)
    assert built.tokens.tolist() == again.tokens.tolist()
    assert built.bounds.tolist() == again.bounds.tolist()
    assert [s.tolist() for s in built.sources] == [s.tolist() for s in again.sources]


def test_chains_are_one_node_and_their_length_costs_no_recursion() -> None:
    long = [k % 7 for k in range(30_000)]
    built = at_the_end([long[: 100 * k] for k in range(1, 301)])
    assert len(built.parents) == 1 and len(built.tokens) == 29_999
    built = at_the_end([[*long[: 50 * k], 9, 9, 9] for k in range(1, 601)], 1024)
    assert len(built.parents) == 1199
    passes = plan_passes(built, 2048)
    assert sum(len(one.nodes) for one in passes) == 1199 and len(passes) > 15


def at_the_end(rows: list[list[int]], longest: int | None = None) -> Trie:
    """Only the last token of each row is trained."""
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    trained = [np.array([len(row) - 1]) for row in rows]
    return trie_of(arrays, trained, [b""] * len(rows), longest_node=longest)


def divided(rows: list[list[int]], budget: int) -> tuple[Trie, int]:
    return trie(rows, max(budget // 2, 1))[0], budget


def line_of(passes: list[NodePass], number: int) -> list[int]:
    """The passes that a pass descends from, the first one first."""
    line: list[int] = []
    while (number := passes[number].parent) >= 0:
        line.insert(0, number)
    return line


def members(built: Trie, one: NodePass) -> list[int]:
    return [t for n in one.nodes for t in range(int(built.bounds[n]), int(built.bounds[n + 1]))]


def attended(built: Trie, passes: list[NodePass], number: int) -> list[list[int]]:
    """The tokens that each token of a pass attends to, as its blocks say."""
    one = passes[number]
    line = line_of(passes, number)
    own = members(built, one)
    out: list[list[int]] = [[] for _ in own]
    for block in one.blocks:
        keys = members(built, passes[number if block.level is None else line[block.level]])
        for n in range(block.count):
            query, key = block.query + n * block.queries, block.key + n * block.keys
            for k in range(block.queries):
                last = k + 1 if block.causal else block.keys
                out[query + k] += keys[key : key + last]
    return out


@settings(deadline=None, max_examples=200)
@given(ROWS, st.integers(1, 40))
def test_a_token_attends_to_its_ancestors_once_in_any_plan(
    rows: list[list[int]], budget: int
) -> None:
    built, _ = divided(rows, budget)
    passes = plan_passes(built, budget)
    seen = [t for one in passes for t in members(built, one)]
    assert sorted(seen) == list(range(len(built.tokens)))
    longest = max(map(len, rows))
    opened: list[int] = []
    for number, one in enumerate(passes):
        while opened and opened[-1] != one.parent:
            opened.pop()
        assert opened or one.parent < 0, "a pass comes after its parent, while that is retained"
        opened.append(number)
        retained = [members(built, passes[k]) for k in opened]
        assert len(retained[-1]) <= max(budget, 1)
        most = max(budget, longest + max(budget // 2, 1))
        assert sum(map(len, retained)) <= most, "memory is bounded by budget and longest row"
        expected = [ancestors(built, t) for t in members(built, one)]
        assert [sorted(keys) for keys in attended(built, passes, number)] == expected


def test_a_group_is_computed_as_one_prefix_and_a_pass_per_session() -> None:
    sessions = [[*([7] * 30), k, *([k] * 20), 0] for k in range(4)]
    built, _ = divided(sessions, 60)
    passes = plan_passes(built, 60)
    assert [len(members(built, one)) for one in passes] == [30, 21, 21, 21, 21]
    assert [one.parent for one in passes] == [-1, 0, 0, 0, 0]
    (whole,) = plan_passes(trie(sessions)[0], 1000)
    equal = [block for block in whole.blocks if block.count > 1]
    assert [(block.queries, block.count) for block in equal] == [(21, 4)]
