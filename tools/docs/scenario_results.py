"""Fill the results into reliability.md's table of scenarios, from what the proofs' runs kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "results.jsonl"
TARGET = ROOT / "docs" / "reference" / "reliability.md"
_ROW = re.compile(r"^\| \d+ \|.+ \|$", re.M)
_CELL = re.compile(r"(?<!\\)\|")


def render() -> str:
    """Return the document with the last two cells of each scenario as the results have them."""
    results = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]

    def fill(row: re.Match[str]) -> str:
        *cells, proofs, _, _ = _CELL.split(row[0])[1:-1]
        files = re.findall(r"`(tests/[\w/]+\.py)`", proofs)
        found = [_of(file, results) for file in files]
        texts = [_text(each, alone=len(files) == 1) for each in found if each is not None]
        made = {f"{each['date']} {each['commit']}": None for each in found if each is not None}
        last = ["; ".join(texts) or "-", ", ".join(made) or "-"]
        return "|".join(["", *cells, proofs, *(f" {text} " for text in last), ""])

    return _ROW.sub(fill, TARGET.read_text("utf-8"))


def _of(file: str, results: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return a file's result, of the long form if there is one."""
    mine = [each for each in results if each["proof"] == file]
    return min(mine, key=lambda each: each["form"] == "short", default=None)


def _text(result: dict[str, Any], *, alone: bool) -> str:
    name = "" if alone else f"{Path(result['proof']).name}: "
    said = f"{result['failed']} of {result['failed'] + result['passed']} FAILED"
    verdict = said if result["failed"] else "kept"
    text = f"{name}{verdict} ({result['form']}, {result['passed']} passed)"
    return ": ".join(filter(None, (text, "; ".join(result["figures"])))).replace("|", "\\|")
