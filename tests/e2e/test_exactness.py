"""The product's law: what was recorded is what a fresh forward pass says, token by token."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from any_agent.config import Config
from any_agent.launcher.trial import trial_dir
from any_agent.types import Continuation, Interaction
from tests.support.e2e.live_run import live_config, recompute, recorded, run_live

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def live(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> tuple[Config, list[list[Interaction]]]:
    """A run of some training steps under twelve agents, and all that was recorded."""
    settings = {"train.checkpoint_every": 3}
    config = live_config(tmp_path_factory.mktemp("live"), tiny_model_dir, **settings)
    # The one that takes nothing away: all that others may not do, the files say themselves.
    before = os.umask(0)
    try:
        assert run_live(config) >= 96
    finally:
        os.umask(before)
    return config, recorded(config)


def test_every_logprob_is_that_of_its_tokens_version(live) -> None:
    config, sessions = live
    checks = recompute(config, sessions)
    interrupted = [c for c in checks if len(np.unique(c.interaction.output_versions)) > 1]
    versions = {int(v) for c in checks for v in c.interaction.output_versions}
    tokens = sum(len(c.recomputed) for c in checks)
    worst = max(c.error for c in checks)
    print(
        f"\n{len(checks)} interactions, {tokens} tokens, versions {sorted(versions)}, "
        f"{len(interrupted)} interrupted by an update, worst error {worst:.2e}"
    )
    assert len(checks) >= 200
    assert len(versions) >= 5
    assert len(interrupted) >= 5
    assert worst < TOLERANCE


def test_the_law_would_notice_another_versions_weights(live) -> None:
    config, sessions = live
    checks = recompute(config, sessions[:30], version_shift=1)
    wrong = [c for c in checks if c.error > 10 * TOLERANCE]
    assert len(wrong) > 0.9 * len(checks)


def test_continued_prompts_begin_with_all_that_came_before(live) -> None:
    _, sessions = live
    continued = [i for s in sessions for i in s if i.continuation is Continuation.EXACT]
    roots = [i for s in sessions for i in s if i.continuation is Continuation.ROOT]
    branches = [i for s in sessions for i in s if i.continuation is Continuation.BRANCH]
    # Every later turn continued; that the engine saw these very ids is what the logprobs prove.
    assert len(continued) >= 50
    assert not branches
    assert len(roots) == sum(1 for s in sessions if s)


def test_nobody_but_its_owner_can_read_a_run(live) -> None:
    run = trial_dir(live[0])
    found = [run.path, *run.path.rglob("*")]
    expected = {"rank-0.sqlite", "secret.key", "metrics.jsonl", "trainer.log", "rank-0.log", "url"}
    expected |= {"model.safetensors", "optimizer.safetensors", "config.yaml", "state.json"}
    assert expected | {"latest"} <= {path.name for path in found}
    assert any(path.parent == run.manifests for path in found)
    open_to_others = [
        f"{path.relative_to(run.path)} {path.stat().st_mode & 0o777:o}"
        for path in found
        if path.stat().st_mode & 0o077
    ]
    assert open_to_others == []
