"""docs/from-areal.md: every documented name is in it, and every row has a test, or a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.areal.names import DOCUMENTED

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "from-areal.md"
REASON = "not here: "


def rows() -> list[list[str]]:
    """The cells of every row of its tables that map something."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", DOCUMENT.read_text(), re.M):
        head, _, *lines = (_cells(line) for line in table.splitlines())
        if head[0] == "AReaL":
            assert head == ["AReaL", "here", "shown by"], head
            found += lines
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|\n"))]


@pytest.mark.parametrize("document", DOCUMENTED)
def test_every_documented_name_is_mapped(document: str) -> None:
    mapped = {name for row in rows() for name in re.findall(r"`([^`]+)`", row[0])}
    assert not [name for name in DOCUMENTED[document].split() if name not in mapped]


def test_every_row_has_a_test_or_a_reason() -> None:
    lacking = [row for row in rows() if not _tests(row) and not row[1].startswith(REASON)]
    assert len(rows()) > 60
    assert not lacking


def test_every_named_test_is_there() -> None:
    named = {test for row in rows() for test in _tests(row)}
    assert not [test for test in sorted(named) if not _exists(*test.split("::"))]


def test_every_cell_is_there() -> None:
    assert not [row for row in rows() if len(row) != 3 or not all(row[:2])]


def _tests(row: list[str]) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::\w+)`", row[2])


def _exists(file: str, name: str) -> bool:
    path = ROOT / file
    if not path.exists():
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(
        isinstance(node, kinds) and node.name == name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )
