"""A pretrained model of 135 M parameters: made, examined, trained, every log-probability true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from any_agent.config import Config
from any_agent.rundir.layout import RunDir
from any_agent.types import Interaction
from tests.support.e2e.live_run import live_config, recompute, recorded, run_live, steps_of
from tests.support.e2e.serving import run_cli

CALLS = 50
STEPS = 2
TOLERANCE = 3e-4
"""In nats. Thirty layers in float32 differ by a tenth of it between a cache of keys and values and
a whole pass."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    done = run_cli("model", "smollm2", "smollm2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "made smollm2"
    assert done.stderr == ""
    return folder / "smollm2"


@pytest.fixture(scope="module")
def live(folder: Path, model: Path) -> Config:
    """A run of two steps under twelve agents, which reward at random."""
    settings = {"sampling.max_new_tokens": 8, "rollout.batch_size": 8, "train.lr": 1e-5}
    settings |= {
        "train.steps": STEPS,
        "rollout.max_concurrent": 16,
        "train.micro_batch_tokens": 512,
    }
    config = live_config(folder / "runs", model, **settings)
    run_live(config)
    return config


def test_a_real_model_passes_the_doctor(model: Path) -> None:
    done = run_cli("doctor", str(model), "--json", cwd=model.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["sound"]
    assert sum(verdict["verdict"] == "passed" for verdict in report["verdicts"]) >= 10


def test_a_real_model_is_loaded_well_enough_to_speak_english(model: Path) -> None:
    """Weights in the wrong order, or a tokenizer of other tokens, would not know this."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("The capital of France is Paris, and the capital of Italy is Rome.").input_ids
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        loss = causal(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert float(loss) < 2.5, "a uniform guess costs 10.8 nats"


def calls_of(config: Config, least: int) -> list[list[Interaction]]:
    """Return the newest sessions with so many calls; the versions of most of them were trained."""
    some: list[list[Interaction]] = []
    for session in sorted(filter(None, recorded(config)), key=lambda s: -s[0].created_at):
        some.append(session)
        if sum(map(len, some)) >= least:
            return some
    raise AssertionError(f"only {sum(map(len, some))} calls were recorded")


def test_every_logprob_is_that_of_its_tokens_version(live: Config) -> None:
    checks = recompute(live, calls_of(live, CALLS))
    versions = {int(v) for c in checks for v in c.interaction.output_versions}
    worst = max(check.error for check in checks)
    print(f"\n{len(checks)} calls, versions {sorted(versions)}, worst error {worst:.1e}")
    assert len(checks) >= CALLS
    assert versions - {0}
    assert worst < TOLERANCE


def test_the_real_model_was_trained_and_other_weights_would_be_noticed(live: Config) -> None:
    checks = recompute(live, calls_of(live, 1), version_shift=-1)
    assert max(check.error for check in checks) > 10 * TOLERANCE
    run = RunDir.of(live.root, live.user, live.experiment, live.trial)
    lines = steps_of(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["grad_norm"] > 0 for line in lines)
