"""The examples with workflows, judges, models and programs of one's own, by their READMEs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from examples.multi_turn_math.agent import RETRY
from tests.clients.environment import component, node_with
from tests.support.e2e.serving import CLI, Served, environment, serve
from tests.support.examples import (
    EXAMPLES,
    ROOT,
    Ran,
    asked,
    number,
    read,
    run_example,
    small,
    tiny_settings,
)
from tests.support.taught_models import taught_model
from tests.support.trained_talks import check_talks, talks


def trained(run: Ran) -> Ran:
    """Two steps; groups whose runs all score the same teach nothing, and are in no step."""
    assert [step["step"] for step in run.steps] == [1, 2]
    assert all(0 < reward < 1 for reward in run.rewards)
    return run


def as_the_readme_has_it(example: str, folder: Path, *more: str) -> Ran:
    """Train the tiny model with the README's own settings."""
    model, *rest = tiny_settings(example)
    assert model == "model.path=/tmp/tiny"
    here = [f"model.path={taught_model('sums')}", f"root={folder}/runs", "server.port=0"]
    run = run_example(example, [*here, *more, *rest], folder)
    assert len(run.steps) == 10
    return run


def test_a_workflow_of_ones_own_trains(tmp_path: Path) -> None:
    run = trained(
        run_example("custom_workflow", small(tmp_path, "largest=4", "budget=3"), tmp_path)
    )
    assert all(0 < step["stats"]["rollout/cut"] <= 1 for step in run.steps)
    for row in run.rows:
        # Thoughts and all: it reads them, too.
        right = number(row["completion"]) == str(sum(asked(row)))
        assert right == (row["reward"] == 1.0), row


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Served]:
    model = f"model.path={taught_model('judge')}"
    options = ("--no-train", model, "model.name=judge", "server.port=0", "server.ranks=1")
    with serve(*options, cwd=tmp_path) as served:
        yield served


def test_a_judge_trains(judge: Served, tmp_path: Path) -> None:
    """Two tiny models, each with a service."""
    params = f'{{model: openai/judge, api_base: "{judge.url}/v1"}}'
    frozen = [
        f"frozen.model_list=[{{model_name: judge, litellm_params: {params}}}]",
        "frozen.session_usd=null",
    ]
    run = trained(run_example("judge", small(tmp_path, "largest=4", *frozen), tmp_path))
    # The judge's answers are in no row: one call of the policy is all that a run is.
    assert all("Is the given answer right?" not in row["prompt"] for row in run.rows)
    agreed = [(read(row) == str(sum(asked(row)))) == (row["reward"] == 1.0) for row in run.rows]
    assert sum(agreed) > 0.5 * len(agreed), "the judge is taught to be right nearly always"


def test_sums_with_a_second_try_train(tmp_path: Path) -> None:
    settings = small(tmp_path, "largest=4", "eval.every=2")
    run = trained(run_example("multi_turn_math", settings, tmp_path))
    assert [0 < found["reward"] < 1 for found in run.evals] == [True]
    for row in run.rows:
        right = number(read(row)) == str(sum(asked(row)))
        assert right == (row["reward"] == 1.0), row
        # An answer that needed another one gets nine tenths of what that one got.
        known = {0.0, 1.0} if RETRY in row["prompt"] else {0.0, 0.9, 1.0}
        assert round(row["reward"], 3) in known


def test_the_tiny_model_learns_sums_as_the_readme_has_it(tmp_path: Path) -> None:
    # Of so many runs that both means are within a few hundredths.
    run = as_the_readme_has_it("multi_turn_math", tmp_path, "eval.group_size=4")
    before, after = (found["reward"] for found in run.evals)
    assert before < 0.8
    assert after > before + 0.1


def test_an_agent_for_node_trains(tmp_path: Path) -> None:
    readme = (EXAMPLES / "node_agent" / "README.md").read_text()
    (folder,) = re.findall(r"^npm ci --prefix (.*)$", readme, re.M)
    assert node_with("example-node_agent") == ROOT / folder
    run = run_example("node_agent", small(tmp_path), tmp_path, LARGEST="4", GROUP="4")
    assert [step["step"] for step in run.steps] == [1, 2]
    assert "of 4 finalized, mean reward" in run.said
    found = talks("node-agent", tmp_path)
    assert len(found) == sum(step["sessions"] for step in run.steps)
    check_talks(found, answer=number, reward=lambda right, used: right + 0.1 * used)


def test_an_agent_in_bash_trains(tmp_path: Path) -> None:
    for program in ("curl", "jq"):
        component(program)
    run = trained(run_example("shell_agent", small(tmp_path), tmp_path, LARGEST="4", GROUP="4"))
    assert "of 4 finalized, mean reward" in run.said
    found = talks("shell-agent", tmp_path)
    assert len(found) == sum(step["sessions"] for step in run.steps)
    # Its reward is that of the last line that it prints, and of nothing else in that line.
    last = lambda said: said.split("\n")[-1]  # noqa: E731
    check_talks(found, answer=last, reward=lambda right, used: float(right))


def ended_well(run: Ran) -> None:
    """It says what was measured, and has drawn the curve."""
    shares = [evaluation["reward"] for evaluation in run.evals]
    told = f"{shares[0]:.1%} before, {shares[-1]:.1%} after"
    assert f"right on sums that training never sees: {told}\n" in run.said
    assert (run.folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    for row in run.rows:
        assert row["reward"] == float(number(read(row)) == str(sum(asked(row)))), row


def test_a_pretrained_model_trains(tmp_path: Path) -> None:
    text = (EXAMPLES / "real_model/README.md").read_text()
    (command,) = re.findall(r"^any-agent (model smollm2) /tmp/smollm2$", text, re.M)
    model = tmp_path / "smollm2"
    subprocess.run([*CLI, *command.split(), model], cwd=tmp_path, env=environment(), check=True)
    settings = ["largest=4", "sampling.max_new_tokens=12", "train.lr=1e-5"]
    small_model = small(tmp_path, *settings, model=model)
    ended_well(trained(run_example("real_model", small_model, tmp_path)))


def test_the_tiny_model_learns_as_the_readme_of_the_pretrained_one_has_it(tmp_path: Path) -> None:
    more = ("eval.group_size=20", "rollout.dump_to_file=true")
    run = as_the_readme_has_it("real_model", tmp_path, *more)
    # Sums up to 4 are few: what it learns on them does not carry over to those held out.
    assert mean(run.rewards[-3:]) > run.rewards[0] + 0.1
    ended_well(run)
