"""`examples/experimental/proxy`: its script trains the agent of a file in the current folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from any_agent import GRPOConfig, get_custom_dataset
from any_agent.config import load_config
from tests.support.areal.calculator import calculator
from tests.support.areal.training import settings, tasks, trained
from tests.support.examples import EXAMPLES

pytestmark = pytest.mark.service

FOLDER = EXAMPLES / "experimental" / "proxy"
NAMED = ["scheduler.type=local", "workflow=my_agent.MathAgent"]


def blocks(language: str) -> list[str]:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def test_it_trains_the_agent_of_its_readme(tiny_model_dir: Path, tmp_path: Path) -> None:
    (agent,) = blocks("python")
    (tmp_path / "my_agent.py").write_text(agent)
    given = ["--config", str(FOLDER / "config.yaml"), *NAMED]
    with calculator(tiny_model_dir) as engine:
        given += settings(tiny_model_dir, engine.url, tasks(tmp_path / "t.jsonl", 8), tmp_path)
        run = trained(sys.executable, FOLDER / "train.py", given, cwd=tmp_path)
    assert [(step["step"], step["sessions"]) for step in run.steps] == [(1, 4), (2, 4)]
    assert [step["reward"] for step in run.steps] == [0.5, 0.5]
    assert "] INFO: any-agent server listening at http://127.0.0.1:" in run.said


def test_its_command_and_its_data_are_there() -> None:
    command = blocks("bash")[0].replace("\\\n", " ").split()
    script, config = (
        "examples/experimental/proxy/train.py",
        "examples/experimental/proxy/config.yaml",
    )
    assert command == ["python3", script, "--config", config, *NAMED]
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    (tiny,) = re.findall(r"with `(model\.path=/tmp/tiny .*?)` after", text)
    read = load_config(FOLDER / "config.yaml", [*NAMED, *tiny.split()], {}, kind=GRPOConfig)
    assert read.workflow == "my_agent.MathAgent"
    path = EXAMPLES.parent / read.train_dataset.path
    rows = get_custom_dataset(split="train", dataset_config=read.train_dataset, path=path)
    assert len(rows) == 25 and set(rows[0]) == {"messages", "answer"}
