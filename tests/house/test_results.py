"""Results of proofs are kept by their runs, and the document shows what was kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import results
from tests.support.results import Result
from tests.support.script_module import load_script

PROOF = "tests/e2e/test_run_removed.py"


def test_the_document_shows_the_last_long_result_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, document = tmp_path / "results.jsonl", load_script("tools/docs/scenario_results.py")
    monkeypatch.setattr(results, "RESULTS", kept)
    monkeypatch.setattr(document, "RESULTS", kept)

    def shown(scenario: int) -> str:
        rows = document.render().splitlines()
        (row,) = [line for line in rows if line.startswith(f"| {scenario} |")]
        return str(row)

    # What the table does not name is not kept; a later result replaces one of its file and form.
    results.record([Result("tests/house/test_results.py", "long", 1)])
    results.record([Result(PROOF, "long", 2, 0, ["test_x[a-b]: 24 times"])])
    results.record([Result(PROOF, "long", 1, 1, ["test_x[a-b]: 25 times"]), Result(PROOF, "short")])
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(line["form"], line["failed"]) for line in lines] == [("long", 1), ("short", 0)]
    assert all(line["commit"] and line["date"] for line in lines)
    assert "1 of 2 FAILED (long, 1 passed): 25 times" in shown(29)
    results.record([Result(PROOF, "long", 2)])
    assert "| kept (long, 2 passed) |" in shown(29)
    assert shown(1).endswith("| - | - |")
