"""The benchmark of weight updates runs, here with a model that is hardly there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "weights.py"


@pytest.mark.timeout(300)
def test_it_tells_what_each_way_costs() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--parameters", "1e6", "--rounds", "1"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    # Those that change an engine's weights have a pause, too.
    ways = {"write": 4, "load": 4, "disk": 5, "broadcast": 4, "distributed": 5}
    for way, columns in ways.items():
        assert re.search(rf"^{way}(\s+\d+\.\d\d){{{columns}}}\s*$", done.stdout, re.MULTILINE), way
    assert re.search(r"^disk / .* \d+\.\d\d$", done.stdout, re.MULTILINE)
    assert re.search(r"^distributed / .* \d+\.\d\d$", done.stdout, re.MULTILINE)
