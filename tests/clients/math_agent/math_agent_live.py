"""AReaL's MathAgent, on OpenAI's Agents SDK with tools and math_verify, trained as it is written.

math_verify stops a long comparison by a signal, which works in a main thread only, so it goes to
processes of its own by itself.
"""

from __future__ import annotations

from pathlib import Path

from tests.areal.calculator import calculator
from tests.areal.training import DOCUMENTS, settings, tasks, trained
from tests.clients.environment import python_with

PINS = Path(__file__).with_name("requirements.txt")


def test_the_guides_script_trains_its_agent(tiny_model_dir: Path, tmp_path: Path) -> None:
    python = python_with("math-agent", PINS, ours=True)
    with calculator(tiny_model_dir) as engine:
        given = settings(tiny_model_dir, engine.url, tasks(tmp_path / "tasks.jsonl", 8), tmp_path)
        more = "workflow=my_agent.MathAgent"
        run = trained(python, DOCUMENTS / "train.py", [*given, more], cwd=tmp_path)
    assert [step["step"] for step in run.steps] == [1, 2]
    # Each session is two calls: one of the tool, and one with its result.
    assert [step["sessions"] for step in run.steps] == [4, 4]
    assert [step["reward"] for step in run.steps] == [0.5, 0.5]
    prompts = [engine.decode(request["input_ids"]) for request in engine.requests]
    assert sum("<tool_response>" in prompt for prompt in prompts) >= 8
