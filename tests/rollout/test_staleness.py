from __future__ import annotations

import pytest

from any_agent.config import RolloutConfig
from any_agent.protocol.training import Capacity
from any_agent.rollout.admission import free_slots, stalled

CONFIG = RolloutConfig(batch_size=8, max_concurrent=16, eta=2)


def capacity(running: int = 0, buffered: int = 0, reserved: int = 0, waiting: int = 0) -> Capacity:
    return Capacity(
        admitted=100,
        reserved=reserved,
        waiting=waiting,
        running=running,
        buffered=buffered,
        limit=100,
    )


@pytest.mark.parametrize(
    ("now", "free"),
    [
        # min(16 - running, 3 * 8 - (running + buffered)), reserved slots counted as running
        (capacity(), 16),
        (capacity(running=5), 11),
        (capacity(running=5, reserved=3), 8),
        (capacity(running=16), 0),
        (capacity(running=20), 0),
        (capacity(buffered=8), 16),
        (capacity(buffered=20), 4),
        (capacity(running=3, buffered=20), 1),
        (capacity(buffered=24), 0),
        (capacity(buffered=30), 0),
        (capacity(running=1, buffered=40), 0),
        # Waiting opens change nothing.
        (capacity(running=16, waiting=50), 0),
        (capacity(buffered=24, waiting=50), 0),
    ],
)
def test_the_formula(now: Capacity, free: int) -> None:
    assert free_slots(now, CONFIG) == free


@pytest.mark.parametrize(
    ("fields", "still"),
    [
        # 3 of 4 buffered, room for 1, and the next group needs 2: nothing would ever move.
        ({"buffered": 3}, True),
        ({}, True),
        # A batch is complete, or something is under way that may complete it.
        ({"buffered": 4}, False),
        ({"buffered": 3, "running": 1}, False),
        ({"buffered": 3, "reserved": 1}, False),
    ],
)
def test_a_batch_that_could_never_be_completed(fields: dict[str, int], still: bool) -> None:
    config = RolloutConfig(batch_size=4, max_concurrent=4, eta=0)
    assert stalled(capacity(**fields), config) is still
