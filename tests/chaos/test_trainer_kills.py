"""A trainer killed -9 fifty times at each boundary of its steps: it ends where one that lives ends.

The short form, each boundary once, is tests/e2e/test_resume.py; in one process, each at every step,
tests/trainer/test_resume.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from any_agent.launcher import Node, NodeOptions
from tests.chaos.conftest import Figure
from tests.e2e.test_resume import config_for, drive, outcome, run_dying
from tests.support.e2e.saved import Saved, assert_same

KILLS = 50
BOUNDARIES = (
    *("lease", "manifest", "step", "before-publish", "publish", "before-ack", "ack"),
    *("before-checkpoint", "checkpoint"),
)
LIMIT = 3500

pytestmark = pytest.mark.timeout(LIMIT)


@pytest.fixture(scope="module")
def uninterrupted(
    long: bool, tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> Saved:
    if not long:
        pytest.skip("its short form is tests/e2e/test_resume.py; --long runs this one")
    config = config_for(tmp_path_factory.mktemp("whole"), tiny_model_dir, **{"train.steps": KILLS})
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        asyncio.run(drive(node, limit=LIMIT))
    return outcome(config)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_trainer_killed_fifty_times_ends_with_the_weights_of_an_unbroken_run(
    uninterrupted: Saved,
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    boundary: str,
    figure: Figure,
) -> None:
    # Only steps with a checkpoint have that boundary; where they are rare, steps are made again.
    every = 1 if boundary.endswith("checkpoint") else 3
    settings = {"train.steps": KILLS, "train.checkpoint_every": every}
    config = config_for(tmp_path / "runs", tiny_model_dir, **settings)
    deaths = [f"{boundary}={step}" for step in range(1, KILLS + 1)]
    run_dying(config, deaths, tmp_path / "marks", monkeypatch)
    assert_same(outcome(config), uninterrupted)
    figure(f"{KILLS} kill -9 at {boundary}: weights, sessions and rewards of one that lives")
