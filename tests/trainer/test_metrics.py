"""The trainer's metrics say what its steps said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from tests.support.trainer.episodes import pair, session
from tests.support.trainer.loop import Lab, config_of
from trainer import report, step_clock, step_maker
from trainer.loss import LossInputs
from trainer.metrics import METRICS, PHASES, TrainerMetrics
from trainer.report import named_means


def shown(metrics: TrainerMetrics) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their own labels."""
    text = metrics.exposition().render().decode()
    return {
        (s.name, *s.labels.values()): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name.startswith("any_agent_")
    }


def test_a_run_is_shown_as_its_file_has_it(settings: list[str]) -> None:
    script = [pair("a"), pair("stale", version=77), pair("b", untrainable="x"), pair("c")]
    lab = Lab(config_of(settings, "train.steps=2"), script)
    lab.executor.rejected = Counter({"zero_variance": 8, "untrainable": 1})
    lab.trainer.train()
    now, lines = shown(lab.trainer.metrics), lab.metrics
    last = lines[-1]
    assert now["any_agent_train_step",] == 2
    assert now["any_agent_train_version",] == 2 == last["version"]
    assert list(last["seconds"]) == list(PHASES)
    for phase in PHASES:
        total = sum(line["seconds"][phase] for line in lines)
        assert math.isclose(now["any_agent_train_seconds_total", phase], total, abs_tol=1e-3)
    assert now["any_agent_train_tokens_total",] == sum(line["tokens"] for line in lines) == 8
    # The two sessions of a step are equal, and the last of their tokens predicts nothing.
    for which, expected in (("tokens_computed", 2 * 4), ("tokens_in_rows", 4 * 5)):
        total = sum(line[which] for line in lines)
        assert now[f"any_agent_train_{which}_total",] == total == expected
    assert now["any_agent_train_interactions_total",] == 4
    assert now["any_agent_train_sessions_total",] == 4
    rejected = {key[1]: value for key, value in now.items() if "rejected" in key[0]}
    assert rejected == {"zero_variance": 8, "untrainable": 3, "stale": 2}
    for name, key in {
        "reward_mean": "reward",
        "staleness_mean_steps": "staleness_mean",
        "staleness_max_steps": "staleness_max",
        "grad_norm": "grad_norm",
        "learning_rate": "learning_rate",
        "loss": "loss",
        "logprob_mismatch": "mismatch",
        "logprob_difference_max": "mismatch_max",
        "capped_ratio": "is_capped",
        "masked_ratio": "is_masked",
        "reference_kl_nats": "kl",
        "importance_weight_mean": "weight",
        "entropy_nats": "entropy",
    }.items():
        assert math.isclose(now[f"any_agent_train_{name}",], last[key]), name
    assert now["any_agent_train_clipped_ratio", "high"] == last["clipped_high"]
    names = {key[0] for key in now}
    # Evaluations and trackers are other tests'; no session has come since the last step, and its
    # tokens are one step old.
    elsewhere = ("_eval_", "_tracker_", "_since_step_reward_", "_mismatch_fresh")
    others = {m.name for m in METRICS if any(part in m.name for part in elsewhere)}
    assert now["any_agent_train_since_step_sessions", "false"] == 0
    assert {metric.name for metric in METRICS} == names | others
    assert all(m.name.endswith("total") == (m.kind == "counter") for m in METRICS)


def test_a_resumed_run_shows_where_it_stands_before_its_first_step(settings: list[str]) -> None:
    Lab(config_of(settings, "train.steps=2"), [pair("a"), pair("b")]).trainer.train()
    again = Lab(config_of(settings, "train.steps=9"), [])
    again.trainer.train()
    now = shown(again.trainer.metrics)
    assert now["any_agent_train_step",] == 2
    # Its weights were published once more.
    assert now["any_agent_train_version",] == 3
    assert ("any_agent_train_loss",) not in now
    fresh = shown(TrainerMetrics(dict))
    assert fresh["any_agent_train_seconds_total", "wait"] == 0
    assert not any("reward" in key[0] or "ratio" in key[0] for key in fresh)


def test_seconds_belong_to_the_phase_that_took_them(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of a step takes a time of its own on a clock that nothing else moves."""
    now = 0.0

    def takes(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds
            return work(*args, **kwargs)

        return timed

    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: now)
    monkeypatch.setattr(report, "append_line", takes(64, report.append_line))
    monkeypatch.setattr(step_maker, "training_batch", takes(2, step_maker.training_batch))
    monkeypatch.setattr(LossInputs, "of", takes(4, LossInputs.of))
    monkeypatch.setattr(torch.autograd, "backward", takes(8, torch.autograd.backward))
    monkeypatch.setattr(torch.optim.AdamW, "step", takes(16, torch.optim.AdamW.step))
    config = config_of(settings, "train.steps=2", "train.checkpoint_every=1")
    lab = Lab(config, [pair("a"), pair("b")])
    lab.executor.prepare_batch = takes(1, lab.executor.prepare_batch)  # type: ignore[method-assign]
    lab.trainer.publish = takes(32, lab.trainer.publish)  # type: ignore[method-assign]
    lab.trainer.save = takes(128, lab.trainer.save)  # type: ignore[method-assign]
    lab.trainer.evaluate = takes(256, lambda step, last: None)
    lab.trainer.train()
    step = {"wait": 1, "pack": 2, "forward": 4, "backward": 8, "optimizer": 16, "sync": 32}
    later = {"report": 64, "checkpoint": 128, "evaluate": 256}
    first, second = lab.metrics
    assert first["seconds"] == step | {"report": 0, "checkpoint": 0, "evaluate": 256}
    assert second["seconds"] == step | later


def test_the_figures_of_a_step_equal_an_independent_computation(settings: list[str]) -> None:
    """Two sessions of two turns: rows of 5 and 10 equal tokens, of which 9 predict something."""
    group = [session(name, reward, turns=2) for name, reward in (("x", 1.0), ("y", 0.0))]
    group[0].interactions[1].finish_reason = "length"
    group[0].named_rewards = {"correct": 1.0, "format": 0.5}
    group[1].named_rewards = {"correct": 0.0}
    lab = Lab(config_of(settings, "train.steps=1"), [group])
    lab.trainer.train()
    (line,) = lab.metrics
    assert (line["tokens"], line["tokens_in_rows"], line["tokens_computed"]) == (8, 30, 9)
    assert line["learning_rate"] == 1e-3
    # Prompts of 3 and 3 + 2 + 3 tokens, outputs of 2.
    assert line["lengths"] == {
        "prompt": {"mean": 5.5, "max": 8},
        "output": {"mean": 2, "max": 2},
        "turns": {"mean": 2, "max": 2},
    }
    assert line["rewards"] == {"correct": 0.5, "format": 0.5}
    assert line["cut"] == 0.25 and line["staleness"] == {"0": 1.0}
    now = shown(lab.trainer.metrics)
    assert now["any_agent_train_logprob_mismatch_fresh",] == line["mismatch_fresh"]
    assert now["any_agent_train_length", "prompt", "mean"] == 5.5
    assert now["any_agent_train_cut_ratio",] == 0.25
    assert now["any_agent_train_staleness_ratio", "0"] == 1
    model = AutoModelForCausalLM.from_pretrained(lab.trainer.config.model.path)
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9]])
    with torch.no_grad():
        every = model(input_ids=ids).logits.double().log_softmax(-1)[0]
    logprobs = torch.stack([every[at - 1, ids[0, at]] for at in (3, 4, 8, 9)])
    difference = logprobs + 3.0  # an episode's recorded log-probabilities are -3
    assert line["mismatch_max"] == pytest.approx(float(difference.abs().max()), rel=1e-5)
    mismatch = (difference.exp() - difference - 1).mean()
    assert line["mismatch"] == pytest.approx(float(mismatch), rel=1e-5)
    assert line["mismatch_fresh"] == pytest.approx(line["mismatch"], rel=1e-5)
    entropies = torch.stack([-(every[at].exp() * every[at]).sum() for at in (2, 3, 7, 8)])
    assert line["entropy"] == pytest.approx(float(entropies.mean()), rel=1e-5)


def test_only_the_named_values_that_most_sessions_have_are_kept() -> None:
    """Agents choose them, and each step's line would have them all."""
    values = {f"n{k:02}": [1.0] * (k + 1) for k in range(40)}
    assert list(named_means(values)) == [f"n{k}" for k in range(24, 40)]
