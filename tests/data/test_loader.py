from __future__ import annotations

import json
from itertools import islice

from any_agent.data import ItemLoader
from any_agent.errors import DatasetError
from tests.support.errors import fails_with

ROWS = [{"k": k} for k in range(10)]


def test_each_iteration_of_a_loader_passes_over_every_item_once() -> None:
    loader = ItemLoader(ROWS, 4, seed=2)
    assert len(loader) == 3
    passes = [[[row["k"] for row in batch] for batch in loader] for _ in range(3)]
    assert [[len(batch) for batch in one] for one in passes] == [[4, 4, 2]] * 3
    flat = [[k for batch in one for k in batch] for one in passes]
    assert all(sorted(one) == list(range(10)) for one in flat)
    assert flat[0] != flat[1]
    in_order = ItemLoader(ROWS, 10, shuffle=False)
    assert [row["k"] for row in next(iter(in_order))] == list(range(10))
    with fails_with(ValueError, "batch_size is 0"):
        ItemLoader(ROWS, 0)
    with fails_with(DatasetError, "empty"):
        ItemLoader([], 4)


def test_a_loader_goes_on_where_it_was() -> None:
    loader, other = ItemLoader(ROWS, 3, seed=1), ItemLoader(ROWS, 3, seed=9)
    first = next(iter(loader))
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    rest = [row["k"] for batch in other for row in batch]
    assert sorted([row["k"] for row in first] + rest) == list(range(10))
    assert rest == [row["k"] for batch in loader for row in batch]


def test_items_ahead_are_done_when_their_caller_says_so() -> None:
    loader = ItemLoader(ROWS, 4, seed=3)
    order = [row["k"] for batch in ItemLoader(ROWS, 4, seed=3) for row in batch]
    ahead = list(islice(loader.ahead(), 12))
    assert [row["k"] for _, row in ahead[:10]] == order
    assert loader.state_dict()["low"] == 0
    loader.consumed([position for position, _ in ahead[:3]])
    loader.consumed(ahead[5][0])
    other = ItemLoader(ROWS, 4)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    rest = [*order[3:5], *order[6:]]
    assert [row["k"] for _, row in islice(other.ahead(), 6)] == rest
    # A pass of lists has what is left of it, too.
    assert [[row["k"] for row in batch] for batch in other] == [rest[:4], rest[4:]]
    assert sorted(row["k"] for batch in other for row in batch) == list(range(10))
