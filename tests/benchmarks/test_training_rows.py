"""The rows that `benchmarks/trainer.py` trains on: both forms train the same tokens."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.training_rows import WORKLOADS, length, make_rows
from trainer.rows import Row


def trained(rows: list[Row]) -> Counter[tuple[tuple[int, ...], float, float]]:
    """Return each trained token with all before it, its log-probability and its advantage."""
    found: Counter[tuple[tuple[int, ...], float, float]] = Counter()
    for row in rows:
        ids = row["input_ids"].tolist()
        for t in row["loss_mask"].nonzero()[:, 0].tolist():
            found[tuple(ids[: t + 1]), float(row["logprobs"][t]), float(row["advantages"])] += 1
    return found


@pytest.mark.parametrize("name", WORKLOADS)
def test_both_forms_train_every_output_token_once(name: str) -> None:
    workload = WORKLOADS[name].smallest()
    made = make_rows(workload, 64)
    assert trained(made.rows) == trained(made.paths)
    turns = workload.groups * workload.sessions * len(workload.parents)
    assert set(trained(made.rows).values()) == {1}
    assert trained(made.rows).total() == turns * workload.output


@pytest.mark.parametrize("name", WORKLOADS)
def test_distinct_tokens_are_those_with_another_beginning(name: str) -> None:
    made = make_rows(WORKLOADS[name].smallest(), 64)
    beginnings = {
        tuple(row["input_ids"].tolist()[: t + 1]) for row in made.rows for t in range(length(row))
    }
    assert made.distinct == len(beginnings)
