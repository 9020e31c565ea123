"""Waits that spread."""

from __future__ import annotations

import random

from any_agent.client.backoff import jittered


def test_it_spreads_within_its_bounds() -> None:
    waits = {jittered(2.0, 0.5, 1.5) for _ in range(100)}
    assert len(waits) > 50 and all(1.0 <= wait <= 3.0 for wait in waits)


def test_the_global_generator_is_left_alone() -> None:
    """It is in checkpoints: a refused request must not change what a resumed run draws."""
    before = random.getstate()
    jittered(1.0)
    assert random.getstate() == before
