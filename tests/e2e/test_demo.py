"""The demo as a newcomer runs it, and what can be done with what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from any_agent import load_engine
from any_agent.demo.task import items, messages
from any_agent.rundir import RunDir
from tests.e2e.serving import run_cli, serve

STEPS = 8
"""Enough to learn something; `make learn` looks at whole runs over many seeds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(folder: Path) -> tuple[dict[str, Any], str]:
    """The figures and the output of a short demo, kept in ``folder``."""
    figures = folder / "figures.json"
    options = ["--steps", str(STEPS), "--json", str(figures), "--keep", str(folder / "kept")]
    done = run_cli("demo", *options, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(figures.read_text()), done.stdout


def test_the_figures_are_those_of_the_run(demo: tuple[dict[str, Any], str]) -> None:
    figures, output = demo
    assert (figures["seed"], figures["steps"]) == (0, STEPS)
    assert not figures["permuted_rewards"]
    assert figures["failed_sessions"] == 0, figures["errors"]
    assert figures["eval_sessions"] == 4 * len(items(held_out=True))
    assert figures["train_sessions"] >= STEPS * 64
    assert figures["before"] <= 0.5
    assert figures["after"] >= figures["before"] + 0.15
    assert figures["seconds"] > 0 and figures["peak_memory_mib"] > 100
    lines = output.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")][-1] == f"{STEPS}/{STEPS}"
    assert f"{figures['before']:.3f} -> {figures['after']:.3f} in {STEPS} steps" in output
    metrics = Path(figures["run"], "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == list(range(1, STEPS + 1))


def test_its_checkpoint_answers_in_this_process(demo: tuple[dict[str, Any], str]) -> None:
    run = Path(demo[0]["run"])
    root, user = run.parents[2], run.parents[1].name
    with load_engine("demo", "seed-0", user=user, root=root) as model:
        assert model.path.name == f"step-{STEPS:08d}"
        answer = model.chat(messages(items(held_out=True)[0]), max_new_tokens=8)
    assert answer["role"] == "assistant"
    assert answer["content"]


def test_its_checkpoint_is_served(demo: tuple[dict[str, Any], str], folder: Path) -> None:
    run = Path(demo[0]["run"])
    assert RunDir.of(run.parents[2], run.parents[1].name, "demo", "seed-0").path == run
    (command,) = [line for line in demo[1].splitlines() if line.startswith("next ")]
    arguments = command.split("any-agent serve ")[1].split()
    with serve(*arguments, cwd=folder) as service:
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused")
        done = client.chat.completions.create(
            model="gpt-4o-mini",
            messages=messages(items(held_out=True)[0]),  # type: ignore[arg-type]
        )
        assert done.choices[0].message.content
        refused = httpx.post(f"{service.url}/rl/v1/start_session", json={})
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "run_finished"
        assert refused.json()["error"]["run"]["checkpoint"].endswith(f"step-{STEPS:08d}")
