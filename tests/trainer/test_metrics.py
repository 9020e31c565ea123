"""The trainer's metrics say what its steps said."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.trainer.episodes import pair
from tests.support.trainer.loop import Lab, config_of
from trainer.metrics import METRICS, TrainerMetrics


def shown(metrics: TrainerMetrics) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their own labels."""
    text = metrics.exposition().render().decode()
    return {
        (s.name, *s.labels.values()): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name.startswith("any_agent_")
    }


@pytest.fixture
def settings(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    return [f"root={tmp_path}", f"model.path={tiny_model_dir}", "train.lr=1e-3", "train.seed=1"]


def test_a_run_is_shown_as_its_file_has_it(settings: list[str]) -> None:
    script = [pair("a"), pair("stale", version=77), pair("b", untrainable="x"), pair("c")]
    lab = Lab(config_of(settings, "train.steps=2"), script)
    lab.executor.rejected = Counter({"zero_variance": 8, "untrainable": 1})
    lab.trainer.train()
    now, lines = shown(lab.trainer.metrics), lab.metrics
    last = lines[-1]
    assert now["any_agent_train_step",] == 2
    assert now["any_agent_train_version",] == 2 == last["version"]
    for phase in ("wait", "train", "publish"):
        total = sum(line["seconds"][phase] for line in lines)
        assert math.isclose(now["any_agent_train_seconds_total", phase], total, abs_tol=1e-3)
    assert now["any_agent_train_tokens_total",] == sum(line["tokens"] for line in lines) == 8
    assert now["any_agent_train_interactions_total",] == 4
    assert now["any_agent_train_sessions_total",] == 4
    rejected = {key[1]: value for key, value in now.items() if "rejected" in key[0]}
    assert rejected == {"zero_variance": 8, "untrainable": 3, "stale": 2}
    for name, key in {
        "reward_mean": "reward",
        "staleness_mean_steps": "staleness_mean",
        "staleness_max_steps": "staleness_max",
        "grad_norm": "grad_norm",
        "loss": "loss",
        "logprob_mismatch": "mismatch",
        "capped_ratio": "is_capped",
        "importance_weight_mean": "weight",
        "entropy_nats": "entropy",
    }.items():
        assert math.isclose(now[f"any_agent_train_{name}",], last[key]), name
    assert now["any_agent_train_clipped_ratio", "high"] == last["clipped_high"]
    names = {key[0] for key in now}
    # Evaluations are another test's.
    of_evaluations = {metric.name for metric in METRICS if "_eval_" in metric.name}
    assert {metric.name for metric in METRICS} == names | of_evaluations
    assert all(m.name.endswith("_total") == (m.kind == "counter") for m in METRICS)


def test_a_resumed_run_shows_where_it_stands_before_its_first_step(settings: list[str]) -> None:
    Lab(config_of(settings, "train.steps=2"), [pair("a"), pair("b")]).trainer.train()
    again = Lab(config_of(settings, "train.steps=9"), [])
    again.trainer.train()
    now = shown(again.trainer.metrics)
    assert now["any_agent_train_step",] == 2
    # Its weights were published once more.
    assert now["any_agent_train_version",] == 3
    assert ("any_agent_train_loss",) not in now


def test_before_the_first_step_nothing_is_made_up() -> None:
    now = shown(TrainerMetrics(dict))
    assert now["any_agent_train_seconds_total", "wait"] == 0
    assert not any("reward" in key[0] or "ratio" in key[0] for key in now)
