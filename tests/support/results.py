"""The results of proofs, kept in tests/results.jsonl: docs/reference/reliability.md shows them.

A run with ``--record`` writes a line for each file of proofs that it ran as a whole, if the table
of scenarios names it. A later line replaces an earlier one of the same file and form.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(os.environ.get("RESULTS_LOG", ROOT / "tests" / "results.jsonl"))
_DOCUMENT = ROOT / "docs" / "reference" / "reliability.md"
FIGURE = "figure"
"""Under this name a proof's report brings what it measured."""
_MOST_FIGURES = 9
_TEST = re.compile(r"^test_\w+(\[.*?\])?: ")
"""Stands before a figure at the end of pytest's output."""
_NOT_CODE = ("tests/results.jsonl", "tests/flaky.jsonl", "docs/reference/reliability.md")


@dataclass(slots=True)
class Result:
    """The outcome of one run of one file of proofs."""

    proof: str
    """The file."""
    form: str
    """`long`, `short`, or for how long it ran."""
    passed: int = 0
    failed: int = 0
    figures: list[str] = field(default_factory=list)
    """Its measurements in words; the first ones are kept."""


def record(results: Iterable[Result]) -> None:
    """Keep results with the date and the commit, each in place of an earlier one."""
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    kept = {(each["proof"], each["form"]): each for each in map(json.loads, lines)}
    made = {"date": time.strftime("%Y-%m-%d"), "commit": _commit()}
    named = proofs_named()
    for result in results:
        if result.proof not in named:
            continue
        new = asdict(result) | made
        new["figures"] = [_TEST.sub("", text) for text in result.figures[:_MOST_FIGURES]]
        kept[result.proof, result.form] = new
    text = "".join(json.dumps(kept[key]) + "\n" for key in sorted(kept))
    RESULTS.write_text(text, encoding="utf-8")


def proofs_named() -> set[str]:
    """Return the files that the table of scenarios names."""
    rows = re.findall(r"^\| \d+ \|.+$", _DOCUMENT.read_text("utf-8"), re.M)
    return {name for row in rows for name in re.findall(r"`(tests/[\w/]+\.py)`", row)}


def _commit() -> str:
    """Return HEAD in short, with a `+` where the code differs from it."""
    head = _git("rev-parse", "--short=8", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", *(f":!{path}" for path in _NOT_CODE))
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
