"""AReaL's agents run as they are written there, by the training script of its guide."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.areal.calculator import calculator
from tests.areal.training import DOCUMENTS, settings, tasks, trained


@pytest.mark.parametrize(("agent", "mode"), [("MyAgent", "inline"), ("MySyncAgent", "subproc")])
def test_the_guides_script_trains_an_agent(
    tiny_model_dir: Path, tmp_path: Path, agent: str, mode: str
) -> None:
    with calculator(tiny_model_dir) as engine:
        given = settings(tiny_model_dir, engine.url, tasks(tmp_path / "tasks.jsonl", 8), tmp_path)
        more = [f"rollout.agent.mode={mode}", f"workflow=my_module.{agent}"]
        run = trained(sys.executable, DOCUMENTS / "train.py", [*given, *more], cwd=tmp_path)
    assert [step["step"] for step in run.steps] == [1, 2]
    assert [step["sessions"] for step in run.steps] == [4, 4]
    assert [step["reward"] for step in run.steps] == [0.5, 0.5]
