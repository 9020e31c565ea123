"""With `train.mask_truncated` a cut output counts in its baseline, and is not trained on."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
import torch

from any_agent.config import TrainConfig
from any_agent.record import InteractionTree, InteractionWithTokenLogpReward
from any_agent.types import ModelResponse, SampledSession, Trajectory
from any_agent.workflow.built_in import TokenRow
from any_agent.workflow.tensors import concat_padded_tensors, rows_of
from tests.support.trainer.episodes import session
from trainer.advantage import STD_FLOOR
from trainer.batch import Group, TrainingBatch, training_batch

MASKS = TrainConfig(mask_truncated=True)


def with_cut(trajectory: Trajectory, *numbers: int) -> Trajectory:
    for k in numbers:
        trajectory.interactions[k].finish_reason = "length"
    return trajectory


def batch_of(
    group: Group, config: TrainConfig = MASKS, step: int = 0, **settings: Any
) -> TrainingBatch:
    config = config.model_copy(update=settings)
    return training_batch([group], config, step=step, eta=0, step_of_version={0: 0})


def test_a_cut_output_counts_in_the_baseline_and_not_in_the_loss() -> None:
    """Dynamic sampling's and the deviation's scores are of all sessions, as without the mask."""
    rewards = (1.0, 0.0, 0.25, 0.0)
    group = [session(f"s{k}", reward, turns=2) for k, reward in enumerate(rewards)]
    with_cut(group[1], 1)
    with_cut(group[3], 0, 1)
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (deviation + STD_FLOOR) for r in rewards]
    batch = batch_of(group, aggregation="session")
    found = [float(row["advantages"]) for row in batch.rows]
    owners = [0, 0, 1, 2, 2]
    assert found == pytest.approx([expected[k] for k in owners], abs=1e-6)
    assert (batch.trained, batch.rejected) == (["s0", "s1", "s2"], {"s3": "truncated"})
    assert (batch.truncated, batch.cut.count(True), batch.scores) == (3, 3, [*rewards])
    # N, and each session's weight, are those of what is left: 2 tokens in each of 5 rows.
    assert [float(row["token_weights"]) for row in batch.rows] == pytest.approx(
        [10 / (3 * n) for n in (4, 4, 2, 4, 4)]
    )
    assert all("cut" not in row for row in batch.rows)
    plain = batch_of(group, TrainConfig())
    assert (len(plain.rows), plain.rejected, plain.truncated) == (8, {}, 0)


def truncated_law() -> None:
    test_a_cut_output_counts_in_the_baseline_and_not_in_the_loss()


def test_a_session_is_truncated_only_if_the_cut_took_what_was_left_of_it() -> None:
    good, cut = session("good", 1.0), with_cut(session("cut", 0.0), 0)
    odd = with_cut(session("odd", 0.0, untrainable="x"), 0)
    assert batch_of([good, cut, odd]).rejected == {"cut": "truncated", "odd": "untrainable"}
    both = batch_of([good, cut], step=1)
    assert both.rejected == {"good": "stale", "cut": "truncated"}
    bound = session("bound", 0.0)
    bound.interactions[0].request = {"bound": [[0, 2]]}
    assert batch_of([good, bound]).rejected == {"bound": "stale"}, "it has no token of its own"


def response(prompt: list[int], output: list[int], why: str) -> ModelResponse:
    n = len(output)
    return ModelResponse(prompt, output, [-1.0] * n, [0] * n, why)  # type: ignore[arg-type]


def talk(*ends: str) -> TokenRow:
    """A conversation of turns of two tokens each."""
    row = TokenRow(1.0)
    for end in ends:
        row.add(response([*row.ids, 7], [8, 9], end))
    return row


def sampled(id: str, result: Any) -> SampledSession:
    rows = rows_of(result)
    return SampledSession(id, "g", [row for row, _ in rows], [t for _, t in rows])


def test_a_row_of_several_outputs_loses_those_that_were_cut() -> None:
    tensors = concat_padded_tensors(
        [talk("length", "stop").tensors(1.0), talk("stop").tensors(1.0)]
    )
    other = sampled("other", talk("length").tensors(0.0))
    batch = batch_of([sampled("one", tensors), other])
    assert [row["loss_mask"].tolist() for row in batch.rows] == [[0, 0, 0, 0, 1, 1], [0, 1, 1]]
    assert batch.rejected == {"other": "truncated"}
    assert (batch.cut, batch.truncated) == ([True, False, False, True], 2)
    del tensors["cut"]
    assert "cut" not in sampled("one", tensors).rows[0], "of these no end is known"


def test_exported_calls_say_which_outputs_were_cut() -> None:
    trajectory = with_cut(session("s", 1.0, turns=3), 1)
    tree = InteractionTree.from_interactions(trajectory.interactions)
    rewards = dict.fromkeys((node.id for node in trajectory.interactions), 1.0)
    ends = []
    for style in ("individual", "concat"):
        exported = InteractionWithTokenLogpReward.of_tree(tree, rewards, style)
        for row, _ in rows_of(exported):
            trained = row["loss_mask"] == 1
            ends.append(row["cut"][trained].tolist())
    assert ends == [[False] * 2, [True] * 2, [False] * 2, [False, False, True, True, False, False]]
    rows = [row for row, _ in rows_of([trajectory])]
    assert [row["cut"][row["loss_mask"] == 1].tolist() for row in rows] == ends[:3]
    # From a service: the end of the response.
    one = InteractionWithTokenLogpReward(response([5, 6], [8, 9], "length"), 1.0)
    ((row, _),) = rows_of({"c": one})
    assert row["cut"].tolist() == [False, False, True, True]
    # And of what has only tensors, none is known.
    plain = {name: values for name, values in row.items() if name != "cut"}
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in plain.items()}
    ((row, _),) = rows_of({"c": InteractionWithTokenLogpReward.from_tensors("c", tensors)})
    assert "cut" not in row
