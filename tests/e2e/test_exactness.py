"""The product's law: what was recorded is what a fresh forward pass says, token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from any_agent.config import Config
from any_agent.types import Continuation, Interaction
from tests.support.e2e.live_run import live_config, recompute, recorded, run_live

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def live(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> tuple[Config, list[list[Interaction]]]:
    """A run of some training steps under twelve agents, and all that was recorded."""
    config = live_config(tmp_path_factory.mktemp("live"), tiny_model_dir)
    assert run_live(config) >= 96
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
