"""Which sessions a step trains on, why it leaves out the others, and which groups teach nothing."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from any_agent.config import TrainConfig, load_config
from any_agent.types import SampledSession, Trajectory
from any_agent.workflow import Episode
from tests.support.trainer.episodes import interaction, pair, session
from tests.support.trainer.loop import Lab, config_of
from trainer import loop
from trainer.batch import (
    TrainingBatch,
    ZeroVarianceGroups,
    in_stable_order,
    session_rewards,
    tokens_of,
    training_batch,
    versions_in,
    weighted,
)
from trainer.rows import misfit

CONFIG = TrainConfig(normalize_std="none")


def batch_of(
    *episodes: list[Trajectory], step: int = 0, eta: int = 2, fits: Any = None, **settings: Any
) -> TrainingBatch:
    """Version v was published after v steps."""
    steps = {version: version for version in versions_in(episodes)}
    config = CONFIG.model_copy(update=settings)
    return training_batch(
        episodes, config, step=step, eta=eta, step_of_version=steps, misfit=fits or (lambda _: None)
    )


def advantages(batch: TrainingBatch) -> list[float]:
    return [float(row["advantages"]) for row in batch.rows]


def test_sessions_are_trained_on_up_to_the_age_of_eta() -> None:
    batch = batch_of(pair("a"), pair("b", turns=2))
    assert batch.trained == ["a-good", "a-bad", "b-good", "b-bad"]
    assert (batch.rejected, batch.scores) == ({}, [1.0, 0.0, 1.0, 0.0])
    assert (len(batch.rows), batch.ages) == (6, [0] * 12)
    assert batch_of(pair("a"), step=2, eta=2).rejected == {}
    old = batch_of([session("odd", 1.0, untrainable="x")], pair("a"), step=3, eta=2)
    assert old.rejected == {"odd": "untrainable", "a-good": "stale", "a-bad": "stale"}
    assert old.rows == [] and old.trained == []


def test_tokens_are_marked_whose_weights_are_those_of_the_step() -> None:
    """Version 2 is version 1 published again, after a restart; an answer may have several."""
    one = session("one", 1.0)
    one.interactions[0].output_versions = np.array([0, 1], dtype=np.int32)
    two = session("two", 0.0)
    two.interactions[0].output_versions = np.array([2, 0], dtype=np.int32)
    steps = {0: 0, 1: 1, 2: 1}
    batch = training_batch([[one, two]], CONFIG, step=1, eta=2, step_of_version=steps)
    marked = [row["fresh"][row["loss_mask"].bool()].tolist() for row in batch.rows]
    assert marked == [[0, 1], [1, 0]]
    assert all(row["fresh"].sum() == 1 for row in batch.rows), "no token of a prompt is marked"


def test_without_a_trainable_interaction_a_session_is_untrainable() -> None:
    """It says nothing about the policy, so it moves no baseline."""
    odd = session("odd", 100.0, untrainable="logit_bias")
    batch = batch_of([*pair("a"), odd])
    assert batch.trained == ["a-good", "a-bad"]
    assert batch.rejected == {"odd": "untrainable"}
    assert batch.scores == [1.0, 0.0]
    assert advantages(batch) == [0.5, -0.5]


def test_an_answer_that_was_discarded_is_not_trained_on_and_does_not_count() -> None:
    """The agent went on from one of two answers to one request."""
    first = interaction("first", session="s")
    kept, other = (interaction(id, "first", session="s") for id in ("kept", "other"))
    last = interaction("last", "kept", session="s")
    other.message_delta, other.reward = kept.message_delta, 100.0
    tree = Trajectory("s", "g", [first, kept, other, last], final_reward=1.0)
    batch = batch_of([tree, session("bad", 0.0)])
    assert batch.trained == ["s", "bad"] and len(batch.rows) == 3 + 1
    assert batch.scores == [1.0, 0.0]


def test_with_old_tokens_only_a_session_is_stale_and_still_in_the_baseline() -> None:
    old = session("old", 4.0, version=0)
    fresh = [session("good", 1.0, version=3), session("bad", 1.0, version=3)]
    batch = batch_of([*fresh, old], step=3, eta=2)
    assert batch.trained == ["good", "bad"]
    assert batch.rejected == {"old": "stale"}
    assert batch.scores == [1.0, 1.0, 4.0]
    assert advantages(batch) == [-1.0, -1.0]
    assert batch.ages == [0, 0, 0, 0]


def test_a_session_with_one_fresh_turn_trains_on_that_turn_alone() -> None:
    first = interaction("first", session="s", version=0)
    second = interaction("second", "first", session="s", version=3)
    mixed = Trajectory("s", "g", [first, second], final_reward=1.0)
    batch = batch_of([mixed, session("bad", 0.0, version=3)], step=3, eta=2)
    assert (batch.trained, batch.rejected) == (["s", "bad"], {})
    assert [int(row["loss_mask"].sum()) for row in batch.rows] == [2, 2]
    assert versions_in([[mixed]]) == {0, 3}


@pytest.mark.parametrize(
    ("limits", "rejected"),
    [
        # A turn is five tokens and follows on those before it.
        ({"longest": 10}, "too_long"),
        ({"context": 14}, "too_long"),
        # An engine that serves another model samples such tokens; each start would meet them again.
        ({"vocabulary": 99}, "unusable"),
        ({"longest": 15, "context": 15, "vocabulary": 100}, None),
    ],
)
def test_a_session_that_the_model_cannot_compute_is_left_out_but_compared_with(
    limits: dict[str, int], rejected: str | None
) -> None:
    odd = session("odd", 4.0, turns=3, output=(4, 99) if "vocabulary" in limits else (4, 9))
    context, vocabulary = limits.get("context"), limits.get("vocabulary", 100)
    batch = batch_of(
        [odd, session("good", 1.0, turns=2), session("bad", 1.0)],
        fits=partial(misfit, vocabulary=vocabulary, context=context),
        max_row_tokens=limits.get("longest"),
    )
    assert batch.rejected == ({"odd": rejected} if rejected else {})
    assert batch.scores == [4.0, 1.0, 1.0]
    assert advantages(batch)[-3:] == [-1.0, -1.0, -1.0]


def weights_of(batch: TrainingBatch) -> list[float]:
    """u / N of each row: the factor of its tokens in the sum that is the loss."""
    total = sum(tokens_of(batch))
    return [float(row["token_weights"]) / total for row in batch.rows]


def uneven() -> list[Trajectory]:
    """Rows of 2, 2, 2 and 4 tokens: a session of three turns, and one of one."""
    return [session("long", 1.0, turns=3), session("short", 0.0, output=(4, 4, 8, 4))]


MEANS = {
    # Each row's tokens weigh 1/4 together, or each session's 1/2.
    "turn": [1 / 8, 1 / 8, 1 / 8, 1 / 16],
    "session": [1 / 12, 1 / 12, 1 / 12, 1 / 8],
    "constant": [1 / 100] * 4,
}


def mean_law(aggregation: str) -> None:
    """Each row's, or each session's, tokens together weigh what the name says."""
    length = 50 if aggregation == "constant" else None
    batch = batch_of(uneven(), aggregation=aggregation, constant_length=length)
    assert weights_of(batch) == pytest.approx(MEANS[aggregation])


@pytest.mark.parametrize("aggregation", MEANS)
def test_token_weights_give_the_mean_that_the_settings_name(aggregation: str) -> None:
    mean_law(aggregation)
    assert all("token_weights" not in row for row in batch_of(uneven()).rows), "over tokens"
    assert TrainConfig(aggregation="constant").constant_length == 4096  # type: ignore[call-arg]


@given(st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=1, max_size=6))
def test_weights_of_means_add_up_to_the_number_of_tokens(sessions: list[list[int]]) -> None:
    """So the learning rate means the same whatever the mean is over."""
    rows = [[{"loss_mask": torch.ones(n, dtype=torch.int32)} for n in one] for one in sessions]
    total = sum(map(sum, sessions))
    for aggregation in ("turn", "session"):
        out = weighted(rows, aggregation)
        assert len(out) == sum(map(len, sessions))
        weights = sum(len(row["loss_mask"]) * float(row["token_weights"]) for row in out)
        assert weights == pytest.approx(total, rel=1e-6)


def test_weights_are_those_of_the_tokens_that_staleness_leaves() -> None:
    """The long session's first turn is stale: two rows of it are left, and a third session none."""
    first = interaction("first", session="long", version=0)
    second = interaction("second", "first", session="long", version=3)
    third = interaction("third", "second", session="long", version=3)
    long = Trajectory("long", "g", [first, second, third], final_reward=1.0)
    short = session("short", 0.0, output=(4, 4, 8, 4), version=3)
    gone = session("gone", 0.5, version=0)
    batch = batch_of([long, short, gone], step=3, eta=2, aggregation="session")
    assert batch.rejected == {"gone": "stale"}
    assert tokens_of(batch) == [2, 2, 4]
    assert weights_of(batch) == pytest.approx([1 / 8] * 3)


OVERLONG = {"overlong_length": 4, "overlong_buffer": 2, "overlong_penalty": 0.5}


def test_long_outputs_lose_reward_each_by_itself() -> None:
    """Not the length of the session counts, and no earlier turn pays for a later one."""
    first = interaction("first", session="s", output=(1, 2, 3, 4, 5))
    second = interaction("second", "first", session="s", output=(8, 9, 8))
    s = Trajectory("s", "g", [first, second], final_reward=1.0)
    episode = [s, session("short", 0.0)]
    batch = batch_of(episode, **OVERLONG)
    # 5 tokens lose all of 0.5, 3 tokens half of it.
    assert batch.scores == pytest.approx([(0.5 + 0.75) / 2, 0.0])
    mean = batch.scores[0] / 2
    assert advantages(batch) == pytest.approx([0.5 - mean, 0.75 - mean, -mean])
    assert batch_of(episode).scores == [1.0, 0.0]


def test_a_row_with_several_outputs_loses_by_its_longest() -> None:
    mask = np.array([0, 1, 1, 1, 0, 0, 1, 1, 0, 1], dtype=np.int32)
    row = {
        "input_ids": np.arange(10, dtype=np.int32),
        "loss_mask": mask,
        "versions": np.where(mask == 1, 0, -1).astype(np.int32),
        "rewards": np.asarray(1.0),
    }
    sampled = SampledSession(session_id="s", group_id="g", rows=[row], temperatures=[None])
    config = CONFIG.model_copy(update=OVERLONG)
    assert session_rewards(sampled, config).rewards == [0.75]
    # A token that a grammar decided is no end of an output.
    row["loss_mask"] = mask * (np.arange(10) != 2)
    assert session_rewards(sampled, config).rewards == [0.75]
    row["loss_mask"] = np.zeros_like(mask)
    assert session_rewards(sampled, config).rewards == [1.0]


def test_a_baseline_over_the_batch_keeps_groups_that_score_alike() -> None:
    episode = [session("a", 1.0), session("b", 1.0)]
    whole = TrainConfig(preset="reinforce_pp")
    assert ZeroVarianceGroups(whole).reject_reason(episode) is None
    other = [session("c", 0.0, group="h"), session("d", 0.0, group="h")]
    batch = training_batch([episode, other], whole, step=0, eta=0, step_of_version={0: 0})
    # Four scores with mean 1/2 and deviation 1 / sqrt(3).
    assert advantages(batch) == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=1e-3)


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
def test_an_episode_without_a_signal_is_rejected_with_its_reason(
    episode: list[Trajectory], why: str | None
) -> None:
    assert ZeroVarianceGroups(CONFIG).reject_reason(episode) == why


def test_the_order_of_a_group_depends_on_its_tokens_alone() -> None:
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


@pytest.mark.parametrize("aggregation", ["session", "turn", "constant"])
def test_the_weights_of_tokens_are_those_of_their_minibatch(aggregation: str) -> None:
    episodes = [[session("a", 1.0, turns=3), session("b", 0.0)], pair("c", turns=2), pair("d")]
    batch = batch_of(*episodes, minibatches=2, aggregation=aggregation, constant_length=5)
    turns = [3, 1, 2, 2, 1, 1]
    owner = [k for k, n in enumerate(turns) for _ in range(n)]
    assert len(batch.minibatches) == 2
    for part in batch.minibatches:
        of_sessions = [[batch.rows[k] for k in part if owner[k] == one] for one in range(6)]
        expected = weighted(of_sessions, aggregation, 5)
        found = [batch.rows[k] for one in range(6) for k in part if owner[k] == one]
        for row, other in zip(found, expected, strict=True):
            assert torch.equal(row["token_weights"], other["token_weights"])
        if aggregation != "constant":
            total = sum(float(r["token_weights"]) * int(r["loss_mask"].sum()) for r in found)
            assert total == pytest.approx(sum(int(r["loss_mask"].sum()) for r in found))


def alike(reward: float) -> Episode:
    return [session(f"s{k}", reward) for k in range(4)]


def test_groups_that_teach_nothing_are_counted() -> None:
    dull = ZeroVarianceGroups(TrainConfig())  # type: ignore[call-arg]
    assert [dull.reject_reason(alike(0.25)) for _ in range(3)] == ["zero_variance"] * 3
    dull.count("not_accepted")
    assert dull.consecutive == 4
    assert "(3 zero_variance, 1 not_accepted)" in str(dull) and str(dull).endswith("0.25")
    assert dull.reject_reason(pair("varied")) is None
    assert dull.consecutive == 0


def test_scores_since_a_step_include_sessions_that_teach_nothing() -> None:
    """The trained groups' mean hides that all others are solved."""
    dull = ZeroVarianceGroups(TrainConfig())  # type: ignore[call-arg]
    assert dull.scores.read() == {"reward": None, "sessions": 0, "dull": 0}
    for _ in range(3):
        dull.reject_reason(alike(1.0))
    dull.reject_reason(pair("varied"))
    dull.refuse(pair("unwanted"), "not_accepted")
    mean = (3 * 4 * 1.0 + 2 * 1.0) / 16
    assert dull.scores.read() == {"reward": mean, "sessions": 16, "dull": 12}
    assert dull.scores.read(take=True) == {"reward": mean, "sessions": 16, "dull": 12}
    assert dull.scores.read()["sessions"] == 0


def test_a_notice_tells_that_most_of_the_last_groups_teach_nothing() -> None:
    """A group that differs now and then makes a step, after a long wait."""
    dull = ZeroVarianceGroups(TrainConfig())  # type: ignore[call-arg]
    for _ in range(3):
        for _ in range(5):
            assert dull.reject_reason(alike(1.0)) == "zero_variance"
        assert dull.reject_reason(pair("varied")) is None
    assert dull.consecutive == 0
    assert dull.notice is not None and "15 of the last 18 groups" in dull.notice
    for _ in range(8):
        assert dull.reject_reason(pair("varied")) is None
    assert dull.notice is None


@pytest.mark.parametrize("fate", ["drop", "keep"])
def test_groups_without_variance_are_dropped_or_kept_as_the_settings_say(fate: str) -> None:
    # By the text of a file or a command line, where some words are no texts.
    settings = ["model.path=x", f"train.dynamic_sampling={fate}"]
    config = load_config(None, settings, environ={}).train
    assert ZeroVarianceGroups(config).reject_reason(alike(0.25)) is None
    dull, varied = alike(0.25), pair("varied")
    # Unequal lengths make no lesson of it.
    dull[0] = session("s0", 0.25, output=(8,))
    config = config.model_copy(
        update={"overlong_length": 2, "overlong_buffer": 1, "overlong_penalty": 1.0}
    )
    batch = training_batch([dull, varied], config, step=0, eta=2, step_of_version={0: 0})
    assert len(batch.scores) == len(dull) + len(varied)
    *alone, good, bad = [float(row["advantages"].max()) for row in batch.rows]
    assert good == -bad != 0
    if fate == "drop":
        assert batch.rejected == {one.session_id: "zero_variance" for one in dull}
        assert not alone and len(batch.trained) == 2
    else:
        assert not batch.rejected and len(alone) == len(dull)


def test_a_trainer_that_waits_tells_people_that_groups_teach_nothing(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "ANNOUNCE_INTERVAL", 0.01)
    monkeypatch.setattr(loop, "FIRST_ANNOUNCE", 0.005)
    lab = Lab(config_of([f"root={tmp_path}", f"model.path={tiny_model_dir}"]), [])
    said: list[str] = []
    lab.trainer.report.say = said.append
    minutes = 0

    def nothing_comes(timeout: float) -> list[Episode]:
        """A few more of them every minute, and then Ctrl-C."""
        nonlocal minutes
        minutes += 1
        if minutes == 4:
            raise InterruptedError
        for _ in range(5):
            lab.trainer.source.zero_variance.reject_reason(alike(0.0))
        raise TimeoutError("0 of 64 sessions came")

    lab.executor.prepare_batch = nothing_comes  # type: ignore[method-assign]
    assert not lab.trainer.train()
    told = [line for line in said if "in a row" in line]
    assert [line.split()[1] for line in told] == ["10", "15"]
    # The first seconds are usual; `waiting` is what an alarm is made of.
    assert [line.split()[0] for line in said if "0 of 64" in line] == ["trainer", *["waiting"] * 2]
    assert "in the last group: 0. Other tasks or rewards would help" in told[-1]
    # So that a console shows it, too.
    shown = lab.trainer.dir.waiting.read_text().splitlines()
    assert shown == ["waiting   for trajectories: 0 of 64 sessions came", told[-1]]
