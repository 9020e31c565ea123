"""Every benchmark runs against today's service, in its smallest form."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import check
from tests.support.taught_models import taught_model

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("name", check.NAMES)
def test_each_benchmark_runs_and_reports_finite_ratios(name: str, tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    made = ["--model", str(taught_model("echo"))] if name == "loop" else []
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", "--smoke", "--json", str(path), *made],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ratios = json.loads(path.read_text())
    assert ratios
    assert all(math.isfinite(value) for value in ratios.values()), ratios


def test_every_benchmark_is_checked() -> None:
    programs = {
        path.stem
        for path in (REPOSITORY / "benchmarks").glob("*.py")
        if "__main__" in path.read_text(encoding="utf-8")
    }
    assert programs == {*check.NAMES, "check"}


def test_ratios_that_became_worse_are_named() -> None:
    before = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    now = {"a": 1.14, "b": 1.2, "c": 0.5, "new": 9.0}
    assert check.worse(before, now) == ["d: gone", "b: 1.2, was 1 (+20%)"]
    assert check.worse(before, before) == []
