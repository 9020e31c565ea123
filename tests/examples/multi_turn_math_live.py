"""The example of sums with a second try, by the command of its README."""

from __future__ import annotations

from pathlib import Path

from examples.multi_turn_math.agent import RETRY
from tests.support.examples import asked, number, read, run_example, small, tiny_settings
from tests.support.taught_models import taught_model


def test_the_example_trains(tmp_path: Path) -> None:
    run = run_example("multi_turn_math", small(tmp_path, "largest=4", "eval.every=2"), tmp_path)
    assert [step["step"] for step in run.steps] == [1, 2]
    # Groups whose runs all score the same teach nothing, and are in no step.
    assert all(0 < reward < 1 for reward in run.rewards)
    assert [0 < found["reward"] < 1 for found in run.evals] == [True]
    second = [row for row in run.rows if RETRY in row["prompt"]]
    first = [row for row in run.rows if RETRY not in row["prompt"]]
    assert {row["reward"] for row in second} <= {0.0, 1.0}
    # An answer that needed another one gets nine tenths of what that one got.
    assert {round(row["reward"], 3) for row in first} <= {0.0, 0.9, 1.0}
    for row in run.rows:
        right = number(read(row)) == str(sum(asked(row)))
        assert right == (row["reward"] == 1.0), row


def test_the_tiny_model_learns_as_the_readme_has_it(tmp_path: Path) -> None:
    model, *rest = tiny_settings("multi_turn_math")
    assert model == "model.path=/tmp/tiny"
    here = [f"model.path={taught_model('sums')}", f"root={tmp_path}/runs", "server.port=0"]
    # Of so many runs that both means are within a few hundredths.
    here.append("eval.group_size=4")
    run = run_example("multi_turn_math", [*here, *rest], tmp_path)
    assert len(run.steps) == 10
    before, after = (found["reward"] for found in run.evals)
    assert before < 0.8
    assert after > before + 0.1
