"""Which sessions a step trains on, and why it leaves out the others."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from any_agent.config import TrainConfig
from any_agent.types import SampledSession, Trajectory
from tests.support.trainer.episodes import interaction, pair, session
from trainer.batch import (
    TrainingBatch,
    ZeroVarianceGroups,
    in_stable_order,
    training_batch,
    versions_in,
)

CONFIG = TrainConfig(normalize_std=False)


def batch_of(
    *episodes: list[Trajectory], step: int = 0, eta: int = 2, longest: int | None = None
) -> TrainingBatch:
    """Version v was published after v steps."""
    steps = {version: version for version in versions_in(episodes)}
    config = CONFIG.model_copy(update={"max_row_tokens": longest})
    return training_batch(episodes, config, step=step, eta=eta, step_of_version=steps)


def advantages(batch: TrainingBatch) -> list[float]:
    return [float(row["advantages"]) for row in batch.rows]


def test_what_is_fresh_is_trained_on() -> None:
    batch = batch_of(pair("a"), pair("b", turns=2))
    assert batch.trained == ["a-good", "a-bad", "b-good", "b-bad"]
    assert batch.rejected == {}
    assert batch.scores == [1.0, 0.0, 1.0, 0.0]
    assert len(batch.rows) == 6
    assert batch.ages == [0] * 12


def test_without_a_trainable_interaction_a_session_is_untrainable() -> None:
    """It says nothing about the policy, so it moves no baseline."""
    odd = session("odd", 100.0, untrainable="logit_bias")
    batch = batch_of([*pair("a"), odd])
    assert batch.trained == ["a-good", "a-bad"]
    assert batch.rejected == {"odd": "untrainable"}
    assert batch.scores == [1.0, 0.0]
    assert advantages(batch) == [0.5, -0.5]


def test_with_old_tokens_only_a_session_is_stale_and_still_in_the_baseline() -> None:
    old = session("old", 4.0, version=0)
    fresh = [session("good", 1.0, version=3), session("bad", 1.0, version=3)]
    batch = batch_of([*fresh, old], step=3, eta=2)
    assert batch.trained == ["good", "bad"]
    assert batch.rejected == {"old": "stale"}
    assert batch.scores == [1.0, 1.0, 4.0]
    assert advantages(batch) == [-1.0, -1.0]
    assert batch.ages == [0, 0, 0, 0]


def test_eta_is_the_last_age_that_counts() -> None:
    assert batch_of(pair("a"), step=2, eta=2).rejected == {}
    assert set(batch_of(pair("a"), step=3, eta=2).rejected.values()) == {"stale"}


def test_a_fresh_turn_after_an_old_one() -> None:
    first = interaction("first", session="s", version=0)
    second = interaction("second", "first", session="s", version=3)
    mixed = Trajectory("s", "g", [first, second], final_reward=1.0)
    batch = batch_of([mixed, session("bad", 0.0, version=3)], step=3, eta=2)
    assert (batch.trained, batch.rejected) == (["s", "bad"], {})
    assert [int(row["loss_mask"].sum()) for row in batch.rows] == [2, 2]
    assert versions_in([[mixed]]) == {0, 3}


def test_a_session_with_a_row_that_is_too_long_is_named_and_still_in_the_baseline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A turn is five tokens and follows on those before it."""
    episode = [session("long", 4.0, turns=3), session("good", 1.0, turns=2), session("bad", 1.0)]
    batch = batch_of(episode, longest=10)
    assert batch.trained == ["good", "bad"]
    assert batch.rejected == {"long": "too_long"}
    assert batch.scores == [4.0, 1.0, 1.0]
    assert advantages(batch) == [-1.0, -1.0, -1.0]
    assert "session long is not trained on: one of its rows has 15 tokens" in caplog.text
    assert batch_of(episode, longest=15).rejected == {}


def test_nothing_but_leftovers() -> None:
    batch = batch_of([session("odd", 1.0, untrainable="x")], pair("a"), step=9)
    assert batch.rows == [] and batch.trained == []
    assert batch.rejected == {"odd": "untrainable", "a-good": "stale", "a-bad": "stale"}


@pytest.mark.parametrize(
    ("episode", "why"),
    [
        (pair("a"), None),
        ([session("a", 1.0), session("b", 1.0)], "zero_variance"),
        ([session("a", 1.0, untrainable="x"), session("b", 0.0, untrainable="x")], "untrainable"),
        ([session("a", 1.0, untrainable="x"), session("b", 0.0)], "zero_variance"),
    ],
    ids=["differ", "same", "untrainable", "one left"],
)
def test_episodes_without_a_signal(episode: list[Trajectory], why: str | None) -> None:
    assert ZeroVarianceGroups(CONFIG).reject_reason(episode) == why


def test_the_order_of_a_group_is_that_of_its_tokens() -> None:
    """Whoever came first, and whatever the sessions are called."""
    short, long = session("a", 1.0), session("b", 0.0, turns=2)
    sampled = SampledSession(
        session_id="data-0-0",
        group_id="data-0",
        rows=[{"input_ids": np.arange(3, dtype=np.int32)}],
        temperatures=[None],
    )
    orders = [in_stable_order(list(group)) for group in permutations([short, long, sampled])]
    assert all(order == orders[0] for order in orders)
    assert {one.session_id for one in orders[0]} == {"a", "b", "data-0-0"}


def test_a_batch_is_divided_by_its_groups_and_sessions() -> None:
    episodes = [pair(name, turns=2) for name in "abcd"]
    names = [f"{name}-{how}" for name in "abcd" for how in ("good", "bad") for _ in range(2)]
    steps = {0: 0}

    def divided(count: int) -> list[set[str]]:
        config = CONFIG.model_copy(update={"minibatches": count})
        batch = training_batch(episodes, config, step=0, eta=2, step_of_version=steps)
        assert sorted(k for part in batch.minibatches for k in part) == list(range(16))
        return [{names[k] for k in part} for part in batch.minibatches]

    assert divided(1) == [set(names)]
    assert sorted(len(part) for part in divided(2)) == [4, 4]
    assert all(len({name[0] for name in part}) == 2 for part in divided(2))
    assert sorted(len(part) for part in divided(8)) == [1] * 8
    assert len(divided(9)) == 8
