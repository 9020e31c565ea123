"""The divergence from a reference in the reward, and what each token gets of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from any_agent.config import TrainConfig
from any_agent.errors import TrainingError
from any_agent.workflow import Episode
from tests.support.errors import fails_with
from tests.support.trainer.episodes import interaction, pair, session
from trainer.batch import TrainingBatch, training_batch
from trainer.rows import Row

Reference: TypeAlias = Callable[[Sequence[Row]], list[Tensor]]
BETA = 0.25
MU = -3.0
REFERENCE = (-3.2, -2.9, -3.6, -4.0, -2.0, -3.1, -3.3)
"""The reference's log-probabilities of the tokens of :func:`episode`, row by row; those of mu are
-3."""


def episode() -> Episode:
    """Three sessions of one, two and one call: outputs of 3; 1 and 2; and 1 tokens."""
    first = interaction("first", session="two", output=(9,))
    second = interaction("second", "first", session="two", output=(8, 9))
    two = session("two", 1.0)
    two.interactions[:] = [first, second]
    return [session("one", 0.0, output=(4, 8, 8)), two, session("odd", 3.0, output=(4,))]


def dealt(rows: Sequence[Row]) -> list[Tensor]:
    """The given numbers, dealt to the rows' trained tokens."""
    counts = [int(row["loss_mask"].sum()) for row in rows]
    assert sum(counts) == len(REFERENCE)
    return list(torch.split(torch.tensor(REFERENCE, dtype=torch.float64), counts))


def batch_of(
    preset: str,
    given: Episode | None = None,
    reference: Reference = dealt,
    **settings: Any,
) -> TrainingBatch:
    config = TrainConfig(preset=preset, kl_reward_coef=BETA)  # type: ignore[arg-type]
    return training_batch(
        [given or episode()],
        config.model_copy(update=settings),
        step=0,
        eta=0,
        step_of_version={0: 0},
        reference=reference,
    )


def by_hand() -> tuple[list[list[float]], list[list[list[float]]]]:
    """Each session's rewards less the divergence of each output, and each token's return."""
    d = [MU - value for value in REFERENCE]
    outputs = [[d[0:3]], [d[3:4], d[4:6]], [d[6:7]]]
    rewards = [[0.0], [1.0, 1.0], [3.0]]
    whole, returns = [], []
    for of_session, given in zip(outputs, rewards, strict=True):
        pairs = list(zip(of_session, given, strict=True))
        whole.append([r - BETA * math.fsum(one) for one, r in pairs])
        returns.append(
            [[r - BETA * math.fsum(one[t:]) for t in range(len(one))] for one, r in pairs]
        )
    return whole, returns


def test_an_output_loses_its_whole_divergence_with_rloo() -> None:
    whole, _ = by_hand()
    scores = [math.fsum(one) / len(one) for one in whole]
    batch = batch_of("rloo")
    assert batch.scores == pytest.approx(scores, abs=1e-12)
    others = [(math.fsum(scores) - score) / 2 for score in scores]
    expected = [r - b for one, b in zip(whole, others, strict=True) for r in one]
    assert [float(row["advantages"]) for row in batch.rows] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("preset", ["reinforce_pp", "reinforce_pp_baseline"])
def test_a_token_loses_what_follows_from_it_with_reinforce_pp(preset: str) -> None:
    whole, returns = by_hand()
    scores = [math.fsum(one) / len(one) for one in whole]
    mean = math.fsum(scores) / 3
    std = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / 2) + 1e-4
    batch = batch_of(preset)
    assert batch.scores == pytest.approx(scores, abs=1e-12)
    expected = [[(r - mean) / std for r in one] for of_session in returns for one in of_session]
    for row, values in zip(batch.rows, expected, strict=True):
        assert row["advantages"].dtype == torch.float32
        mask = row["loss_mask"].bool()
        found = row["advantages"].expand(len(mask))[mask].tolist()
        assert found == pytest.approx(values, abs=1e-6)
    assert any(len(set(values)) > 1 for values in expected), "tokens differ"


def test_a_group_with_nothing_to_learn_teaches_no_token() -> None:
    """Its tokens differ in the divergence alone, which is no lesson about the task."""
    alike = [session("a", 1.0), session("b", 1.0)]
    two = torch.tensor([-3.5, -2.0], dtype=torch.float64)
    batch = batch_of("reinforce_pp_baseline", alike, lambda rows: [two for _ in rows])
    assert all(not row["advantages"].any() for row in batch.rows)


def test_a_session_that_is_too_long_is_not_computed() -> None:
    seen: list[int] = []

    def watched(rows: Sequence[Row]) -> list[Tensor]:
        seen.extend(len(row["input_ids"]) for row in rows)
        return [torch.full((int(row["loss_mask"].sum()),), -3.0) for row in rows]

    given = [session("long", 4.0, turns=2), session("good", 1.0)]
    batch = batch_of("rloo", given, watched, max_row_tokens=5)
    assert seen == [5] and batch.rejected == {"long": "too_long"}
    assert batch.scores == [4.0, 1.0]


def test_a_reference_that_is_not_finite_ends_training() -> None:
    with fails_with(TrainingError, "reference model"):
        batch_of("rloo", pair("a"), lambda rows: [torch.tensor([-1.0, -math.inf]) for _ in rows])
