"""The rows that `benchmarks/trainer.py` trains on: both forms train the same tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.training_rows import QUICK, WORKLOADS, length, make_rows
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


def test_the_tokens_of_the_first_workload() -> None:
    made = make_rows(WORKLOADS["W1"], 4096)
    assert sum(map(length, made.rows)) == 8 * sum(512 + 128 * k for k in range(1, 9))
    assert sum(map(length, made.paths)) == 8 * (512 + 8 * 128)
    assert made.distinct == 512 + 8 * 8 * 128


def test_the_quick_form_has_every_workload() -> None:
    assert {name.split("/")[0] for name in QUICK} == {name.split("/")[0] for name in WORKLOADS}


@pytest.mark.parametrize("name", QUICK)
def test_the_quick_form_has_fewer_sessions_of_the_same_shape(name: str) -> None:
    quick, full = QUICK[name], WORKLOADS[name]
    assert quick.groups * quick.sessions <= full.groups * full.sessions
    assert (quick.system, quick.parents) == (full.system, full.parents)
    assert quick.smallest() == replace(full.smallest(), about=quick.about)
