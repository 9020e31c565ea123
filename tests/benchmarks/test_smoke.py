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
    assert check.worse([before], now) == ["d: gone", "b: 1.2, was 1 (+20%)"]
    assert check.worse([before], before) == []
    assert check.worse([{"b": 1.1}, before], {**now, "d": 1.0}) == []


def test_a_benchmark_that_seems_worse_runs_again_and_its_best_figures_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = {"benchmark": "router", "form": "quick", "commit": "abc", "ratios": {"a": 1, "b": 1}}
    monkeypatch.setattr(check, "kept", lambda: [entry])
    runs = [{"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 9.0, "b": 9.0}]
    monkeypatch.setattr(check, "run", lambda name, form: runs.pop(0))
    assert check.compare("router", "quick") == []
    assert len(runs) == 1
    runs[:] = [{"a": 1.0, "b": value} for value in (1.4, 1.3, 1.5, 1.0)]
    assert check.compare("router", "quick") == ["b: 1.3, was 1 (+30%) (abc)"]
    assert len(runs) == 1
