"""The example of a pretrained model, by the commands of its README: short steps, and the curve."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from statistics import mean

from tests.support.e2e.serving import CLI, environment
from tests.support.examples import (
    EXAMPLES,
    Ran,
    asked,
    number,
    read,
    run_example,
    small,
    tiny_settings,
)
from tests.support.taught_models import taught_model


def ended_well(run: Ran) -> None:
    """It says what was measured, and has drawn the curve."""
    shares = [evaluation["reward"] for evaluation in run.evals]
    told = f"{shares[0]:.1%} before, {shares[-1]:.1%} after"
    assert f"right on sums that training never sees: {told}\n" in run.said
    assert (run.folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    for row in run.rows:
        assert row["reward"] == float(number(read(row)) == str(sum(asked(row)))), row


def test_the_pretrained_model_trains(tmp_path: Path) -> None:
    text = (EXAMPLES / "real_model/README.md").read_text()
    (command,) = re.findall(r"^any-agent (model smollm2) /tmp/smollm2$", text, re.M)
    model = tmp_path / "smollm2"
    subprocess.run([*CLI, *command.split(), model], cwd=tmp_path, env=environment(), check=True)
    settings = ["largest=4", "sampling.max_new_tokens=12", "train.lr=1e-5"]
    run = run_example("real_model", small(tmp_path, *settings, model=model), tmp_path)
    assert [step["step"] for step in run.steps] == [1, 2]
    # Groups whose runs all score the same teach nothing, and are in no step.
    assert all(0 < reward < 1 for reward in run.rewards)
    ended_well(run)


def test_the_tiny_model_learns_as_the_readme_has_it(tmp_path: Path) -> None:
    model, *rest = tiny_settings("real_model")
    assert model == "model.path=/tmp/tiny"
    here = [f"model.path={taught_model('sums')}", f"root={tmp_path}/runs", "server.port=0"]
    here += ["eval.group_size=20", "rollout.dump_to_file=true"]
    run = run_example("real_model", [*here, *rest], tmp_path)
    assert len(run.steps) == 10
    # Sums up to 4 are few: what it learns on them does not carry over to those held out.
    assert mean(run.rewards[-3:]) > run.rewards[0] + 0.1
    ended_well(run)
