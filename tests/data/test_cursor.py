from __future__ import annotations

import json
from collections import Counter
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.data import DatasetCursor
from any_agent.errors import ConfigError
from tests.support.errors import fails_with


def test_each_pass_has_every_item_once_in_an_order_of_its_own() -> None:
    positions = DatasetCursor(50, seed=3, epochs=3)
    passes = [[index for _, index in islice(positions, 50)] for _ in range(3)]
    assert all(sorted(order) == list(range(50)) for order in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert list(positions) == []
    assert passes[0] == [index for _, index in islice(DatasetCursor(50, seed=3), 50)]
    assert passes[0] != [index for _, index in islice(DatasetCursor(50, seed=4), 50)]


def test_the_order_is_the_same_in_any_version() -> None:
    """A checkpoint counts on it: these figures must never change."""
    assert [index for _, index in islice(DatasetCursor(8, seed=1), 16)] == [
        *(6, 2, 3, 7, 1, 4, 5, 0),
        *(2, 0, 3, 4, 1, 6, 7, 5),
    ]


def test_without_shuffling_items_come_as_they_are() -> None:
    positions = DatasetCursor(3, shuffle=False, epochs=2)
    assert list(positions) == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2)]
    positions.consumed([0, 3])
    positions.requeue()
    assert [position for position, _ in positions] == [1, 2, 4, 5]


def test_a_dataset_of_another_length_is_refused() -> None:
    state = DatasetCursor(10).state()
    with fails_with(ConfigError, "9 items", "10"):
        DatasetCursor(9).load(state)
    with fails_with(ConfigError, "empty"):
        DatasetCursor(0)


def test_the_order_goes_on_where_the_settings_have_changed() -> None:
    old = DatasetCursor(20, seed=5)
    first = [next(old) for _ in range(7)]
    old.consumed(position for position, _ in first)
    new = DatasetCursor(20, seed=6, shuffle=False)
    new.load(old.state())
    assert list(islice(new, 13)) == list(islice(old, 13))


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 12),
    epochs=st.integers(1, 3),
    script=st.lists(st.tuples(st.integers(0, 7), st.randoms()), max_size=30),
)
def test_over_kills_no_item_comes_twice_and_none_is_missing(
    length: int, epochs: int, script: list[tuple[int, object]]
) -> None:
    """Steps take some of what is in flight; a checkpoint and a kill come at any time.

    What was consumed after the checkpoint is replayed, as from a manifest, before anything else.
    """
    positions = DatasetCursor(length, seed=length, epochs=epochs)
    kept, trained, flying = positions.state(), list[int](), list[int]()
    replayed: list[int] = []
    for act, random in script:
        if act <= 2:
            flying += [position for position, _ in islice(positions, act + 1)]
        elif act <= 5 and flying:
            random.shuffle(flying)  # type: ignore[attr-defined]
            step, flying = flying[: act - 2], flying[act - 2 :]
            positions.consumed(step)
            trained += step
            replayed += step
        elif act == 6:
            kept, replayed = json.loads(json.dumps(positions.state())), []
        else:
            positions = DatasetCursor(length, seed=0, epochs=epochs)
            positions.load(kept)
            positions.consumed(replayed)
            flying = []
    rest = [position for position, _ in positions]
    assert sorted(trained + flying + rest) == list(range(length * epochs))
    positions.consumed(flying + rest)
    assert positions.epoch == epochs and positions.state()["beyond"] == []
    items = Counter(positions.index(p) for p in range(length * epochs))
    assert set(items.values()) == {epochs}


def test_items_that_teach_nothing_rest_for_one_three_and_seven_passes() -> None:
    positions = DatasetCursor(3, seed=2, epochs=20)
    came: dict[int, list[int]] = {item: [] for item in range(3)}
    # In every pass item 0 teaches; item 1 never does; item 2 does from pass 5 on.
    while (found := next(positions, None)) is not None:
        position, item = found
        now = position // 3
        came[item].append(now)
        for _ in range(2):  # a repeated step says it again
            positions.judged(position, dull=item == 1 or (item == 2 and now < 5))
        positions.consumed(position)
        state = json.loads(json.dumps(positions.state()))
        positions = DatasetCursor(3, seed=2, epochs=20)
        positions.load(state)
    assert came[0] == list(range(20))
    assert came[1] == [0, 2, 6, 14]
    assert came[2] == [0, 2, *range(6, 20)]
    assert positions.epoch == 20 and positions.resting == 1
