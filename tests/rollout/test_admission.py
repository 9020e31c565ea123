"""Free slots divided among ranks: never too many, whole groups, nobody starved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_agent.config import RolloutConfig
from any_agent.protocol.training import Capacity, Unfilled
from any_agent.rollout.admission import RankView, divide, free_slots, stalled, total
from any_agent.rollout.lease_executor import describe_waiting

CONFIG = RolloutConfig(batch_size=8, max_concurrent=16, eta=1)


def view(*queue: int, headroom: int = 0, away: bool = False, **counts: int) -> RankView:
    """``counts``: the running, buffered and reserved slots."""
    fields = {"reserved": 0, "running": 0, "buffered": 0, "limit": 100 + headroom, **counts}
    now = Capacity(admitted=100, waiting=sum(queue), queue=list(queue), **fields)
    return RankView(now, 100 + headroom, away)


def rooms(*views: RankView, turn: int = 0, config: RolloutConfig = CONFIG) -> list[int]:
    return divide(views, config, turn)[0]


def test_free_slots_follow_the_documented_formula() -> None:
    """min(16 - running, 3 * 8 - (running + buffered)), reserved slots counted as running."""
    config = RolloutConfig(batch_size=8, max_concurrent=16, eta=2)
    cases = [
        (view(), 16),
        (view(running=5), 11),
        (view(running=5, reserved=3), 8),
        (view(running=16), 0),
        (view(running=20), 0),
        (view(buffered=8), 16),
        (view(buffered=20), 4),
        (view(running=3, buffered=20), 1),
        (view(buffered=24), 0),
        (view(buffered=30), 0),
        (view(running=1, buffered=40), 0),
        # Waiting opens change nothing.
        (view(50, running=16), 0),
        (view(50, buffered=24), 0),
    ]
    wrong = [(one.now, free) for one, free in cases if free_slots(one.now, config) != free]
    assert not wrong
    one_batch = RolloutConfig(batch_size=8, max_concurrent=64, eta=0)
    assert free_slots(view(running=3, buffered=4).now, one_batch) == 1


def test_a_batch_that_could_never_be_completed_counts_as_stalled() -> None:
    config = RolloutConfig(batch_size=4, max_concurrent=4, eta=0)
    # 3 of 4 buffered, room for 1, and the next group needs 2: nothing would ever move.
    assert all(stalled(one.now, config) for one in (view(buffered=3), view()))
    # A batch is complete, or something is under way that may complete it.
    moving = (view(buffered=4), view(buffered=3, running=1), view(buffered=3, reserved=1))
    assert not any(stalled(one.now, config) for one in moving)


def test_groups_that_are_not_full_are_named_whatever_their_rank() -> None:
    def group(name: str, closes_in: float, members: int = 1) -> Unfilled:
        return Unfilled(group_id=name, size=4, members=members, closes_in=closes_in)

    views = [view(running=2), view()]
    views[0].now.unfilled = [group("late", 500.4), group("later", 600)]
    views[1].now.unfilled = [group("g~1", 20, members=3), group("last", 700)]
    said = describe_waiting(total(views))
    assert "g~1 has 3 of 4" in said and "up to 20 s" in said
    assert [said.find(name) > 0 for name in ("late", "later", "last ")] == [True, True, False]


def test_without_waiters_all_ranks_get_the_same() -> None:
    assert rooms(view(), view()) == [8, 8]
    assert rooms(view(running=1), view(buffered=4), view()) == [4, 4, 3]
    # What is left over goes on from the one whose turn it is.
    assert rooms(view(running=1), view(buffered=4), view(), turn=2) == [4, 3, 4]


def test_ranks_with_waiting_groups_get_room_first_in_turn() -> None:
    assert rooms(view(4, 4, 4), view(4, 4)) == [8, 8]
    assert rooms(view(4, 4, 4), view(4)) == [12, 4]
    assert rooms(view(2), view(), view(2)) == [2 + 4, 4, 2 + 4]
    assert divide([view(8), view(8), view(8)], CONFIG, 1) == ([0, 8, 8], 0)


def test_a_group_that_does_not_fit_yet_keeps_its_turn() -> None:
    """Else the single sessions of the other rank would take each slot that becomes free."""
    views = [view(4), view(1, 1, 1, buffered=13)]
    assert divide(views, CONFIG, 0) == ([0, 0], 0)
    assert divide(views, CONFIG, 1) == ([0, 1], 0)
    assert divide([views[0], view(1, 1, 1, buffered=12)], CONFIG, 0) == ([4, 0], 1)


def test_a_rank_that_is_away_keeps_what_it_may_have() -> None:
    away = view(8, running=2, headroom=5, away=True)
    assert rooms(away, view()) == [0, 9]
    assert rooms(away, view(8)) == [0, 9]
    assert total([away, view(reserved=1)]).reserved == 6
    # Head-room of the others can be taken back, so it is there to be divided.
    assert rooms(view(headroom=5), view(4)) == [6, 10]


def test_where_everything_stands_still_one_group_is_let_in() -> None:
    config = RolloutConfig(batch_size=4, max_concurrent=4, eta=0)
    assert rooms(view(2, 2), view(2, buffered=3), config=config) == [2, 0]
    assert rooms(view(2, 2), view(2, buffered=3), turn=1, config=config) == [0, 2]
    # One that fits is better than one that does not.
    assert rooms(view(2), view(1, buffered=3), config=config) == [0, 1]
    assert rooms(view(2, running=1), view(buffered=3), config=config) == [0, 0]
    assert rooms(view(2), view(buffered=4), config=config) == [0, 0]
    # The rank that is away may be running some.
    assert rooms(view(2), view(buffered=3, headroom=1, away=True), config=config) == [0, 0]


SLOTS = st.integers(0, 20)
VIEWS = st.lists(
    st.builds(
        lambda queue, **fields: view(*queue, **fields),
        st.lists(st.integers(1, 8), max_size=5),
        running=SLOTS,
        buffered=SLOTS,
        reserved=SLOTS,
        headroom=SLOTS,
        away=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)
CONFIGS = st.builds(
    RolloutConfig,
    batch_size=st.integers(8, 32),
    max_concurrent=st.integers(8, 64),
    eta=st.integers(0, 3),
)


@given(VIEWS, CONFIGS, st.integers(0, 4))
def test_never_more_slots_are_given_than_are_free(
    views: list[RankView], config: RolloutConfig, turn: int
) -> None:
    turn %= len(views)
    given_, next_turn = divide(views, config, turn)
    now = total(views)
    free = free_slots(now, config)
    assert all(room >= 0 for room in given_)
    assert all(room == 0 for room, v in zip(given_, views, strict=True) if v.away)
    assert 0 <= next_turn < len(views)
    if stalled(now, config) and sum(given_) > free:
        # One group, of one rank.
        (slots,) = [room for room in given_ if room]
        assert any(slots == v.now.queue[0] for v in views if v.now.queue and not v.away)
    else:
        assert sum(given_) <= free


@given(VIEWS, CONFIGS, st.integers(0, 4))
def test_waiting_opens_come_first(views: list[RankView], config: RolloutConfig, turn: int) -> None:
    """What a rank gets beyond its queue is what nobody waits for."""
    turn %= len(views)
    given_, _ = divide(views, config, turn)
    pairs = list(zip(given_, views, strict=True))
    unserved = [v for room, v in pairs if not v.away and room < sum(v.now.queue)]
    if unserved:
        for room, v in pairs:
            assert room in [sum(v.now.queue[:k]) for k in range(len(v.now.queue) + 1)]


@given(
    st.lists(st.lists(st.integers(1, 8), max_size=8), min_size=2, max_size=4),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_every_group_is_let_in_sooner_or_later(queues: list[list[int]], eta: int, random) -> None:  # type: ignore[no-untyped-def]
    """Sessions end one by one; and every rank never runs out of single sessions that wait, too."""
    config = RolloutConfig(batch_size=8, max_concurrent=8, eta=eta)
    waiting = [[*queue, *[1] * 200] for queue in queues]
    running = [0] * len(queues)
    turn = 0
    for _ in range(400):
        views = [view(*w[:64], running=r) for w, r in zip(waiting, running, strict=True)]
        given_, turn = divide(views, config, turn)
        for rank, room in enumerate(given_):
            while waiting[rank] and waiting[rank][0] <= room:
                room -= waiting[rank][0]
                running[rank] += waiting[rank].pop(0)
        assert sum(running) <= 8
        if all(len(w) <= 200 for w in waiting):
            return
        busy = [rank for rank, number in enumerate(running) if number]
        running[random.choice(busy)] -= 1
    pytest.fail("a group is still waiting")
