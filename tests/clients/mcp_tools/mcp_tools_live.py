"""The example of tools over MCP, by the command of its README."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

from any_agent.config import load_config
from tests.areal.calculator import calculator
from tests.areal.training import settings, trained
from tests.clients.environment import python_with

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "mcp_tools"
PINS = Path(__file__).parents[1] / "math_agent" / "requirements.txt"


def test_the_example_trains(tiny_model_dir: Path, tmp_path: Path) -> None:
    python = python_with("math-agent", PINS, ours=True)
    (command,) = re.findall(r"^python (.*)$", (EXAMPLE / "README.md").read_text(), re.M)
    script, option, config = shlex.split(command)
    with calculator(tiny_model_dir) as engine:
        given = settings(tiny_model_dir, engine.url, None, tmp_path)
        arguments = [option, str(ROOT / config), *given, "rollout.max_concurrent=4"]
        run = trained(python, ROOT / script, arguments, cwd=tmp_path)
    assert [step["step"] for step in run.steps] == [1, 2]
    assert [step["reward"] for step in run.steps] == [0.5, 0.5]
    prompts = [engine.decode(request["input_ids"]) for request in engine.requests]
    # What the server's tool has answered.
    assert any(
        re.search(r"<tool_response>\s*.*\d{3,4}.*</tool_response>", p, re.S) for p in prompts
    )


def test_its_settings_are_right() -> None:
    config = load_config(EXAMPLE / "config.yaml", environ={})
    given = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    assert config.rollout.batch_size == given["rollout"]["batch_size"]
    assert config.rollout.batch_size % config.sessions.group_size == 0
