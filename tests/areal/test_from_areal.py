"""Every documented name has a row in from-areal.md, and every row has tests that exist."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.documents.text import CLASSES, MODULES
from tests.support.areal.names import DOCUMENTED

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools" / "docs"))
SECTIONS: dict[str, list[Any]] = import_module("from_areal").sections()
ROWS = [row for rows in SECTIONS.values() for row in rows]


@pytest.mark.parametrize("document", DOCUMENTED)
def test_every_documented_name_has_a_row(document: str) -> None:
    mapped = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row.areal)}
    assert not [name for name in DOCUMENTED[document].split() if name not in mapped]


def test_every_row_has_a_test() -> None:
    assert len(ROWS) > 100
    assert not [row.areal for row in ROWS if not row.tests]
    assert not [row for row in ROWS if not row.areal or not row.here]


def test_every_named_test_exists() -> None:
    named = {test for row in ROWS for test in row.tests}
    assert not [test for test in sorted(named) if not _exists(*test.split("::"))]


def test_the_modules_of_the_documents_have_a_row_each() -> None:
    rows = {row.areal.strip("`"): row.here for row in SECTIONS["Import names"]}
    assert {name: f"`{here}`" for name, here in {**MODULES, **CLASSES}.items()} == rows
    for name in MODULES.values():
        if not name.startswith("any_agent.camel"):
            import_module(name)


@pytest.mark.parametrize(
    "name", re.findall(r"`any_agent\.(\w+)`", " ".join(row.here for row in ROWS))
)
def test_every_name_that_is_given_can_be_imported(name: str) -> None:
    assert getattr(import_module("any_agent"), name) is not None


@cache
def _functions(file: str) -> frozenset[str]:
    path = ROOT / file
    if not path.exists():
        return frozenset()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def _exists(file: str, name: str) -> bool:
    return name in _functions(file)
