"""The example of a judge, by the command of its README: two tiny models, each with a service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.e2e.serving import Served, serve
from tests.support.examples import asked, read, run_example, small
from tests.support.taught_models import taught_model


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Served]:
    model = taught_model("judge")
    with serve(
        "--no-train",
        *(f"model.path={model}", "model.name=judge", "server.port=0", "server.ranks=1"),
        cwd=tmp_path,
    ) as served:
        yield served


def test_the_example_trains(judge: Served, tmp_path: Path) -> None:
    params = f'{{model: openai/judge, api_base: "{judge.url}/v1"}}'
    frozen = [
        f"frozen.model_list=[{{model_name: judge, litellm_params: {params}}}]",
        "frozen.session_usd=null",
    ]
    run = run_example("judge", small(tmp_path, "largest=4", *frozen), tmp_path)
    assert [step["step"] for step in run.steps] == [1, 2]
    assert all(0 < reward < 1 for reward in run.rewards)
    # The judge's answers are in no row: one call of the policy is all that a run is.
    assert all("Is the given answer right?" not in row["prompt"] for row in run.rows)
    agreed = 0
    for row in run.rows:
        agreed += (read(row) == str(sum(asked(row)))) == (row["reward"] == 1.0)
    assert agreed > 0.5 * len(run.rows), "the judge is taught to be right nearly always"
