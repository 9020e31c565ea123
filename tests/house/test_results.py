"""Results of proofs are kept by their runs, and the document shows what was kept."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support import results
from tests.support.results import Result

PROOF = "tests/e2e/test_run_removed.py"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "results.jsonl"
    monkeypatch.setattr(results, "RESULTS", path)
    return path


def test_a_later_result_replaces_one_of_its_file_and_form(kept: Path) -> None:
    results.record([Result(PROOF, "long", 2, 0, ["test_x[a-b]: 25 times"])])
    results.record([Result(PROOF, "long", 1, 1), Result(PROOF, "short", 2)])
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(line["form"], line["passed"], line["failed"]) for line in lines] == [
        ("long", 1, 1),
        ("short", 2, 0),
    ]
    assert all(line["commit"] and line["date"] for line in lines)


def test_only_what_the_table_names_is_kept(kept: Path) -> None:
    results.record([Result("tests/house/test_results.py", "long", 1)])
    assert kept.read_text() == ""


def test_the_document_has_the_long_result_and_says_what_failed(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = results.ROOT / "tools" / "docs" / "scenario_results.py"
    spec = importlib.util.spec_from_file_location("scenario_results", path)
    assert spec is not None and spec.loader is not None
    document = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(document)
    monkeypatch.setattr(document, "RESULTS", kept)
    results.record([Result(PROOF, "long", 1, 1, ["test_x[a-b]: 25 times"]), Result(PROOF, "short")])
    (row,) = [line for line in document.render().splitlines() if line.startswith("| 29 |")]
    assert "1 of 2 FAILED (long, 1 passed): 25 times" in row
    results.record([Result(PROOF, "long", 2)])
    (row,) = [line for line in document.render().splitlines() if line.startswith("| 29 |")]
    assert "| kept (long, 2 passed) |" in row
    rows = [line for line in document.render().splitlines() if line.startswith("| 1 |")]
    assert rows[0].endswith("| - | - |")
