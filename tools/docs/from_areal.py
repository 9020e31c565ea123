"""Write from-areal.md: the names of AReaL and of the proposal, and their names here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_SOURCE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: names in Markdown, ``pytest`` ids of the tests that show it."""

    areal: str
    here: str
    tests: tuple[str, ...]


def sections() -> dict[str, list[Row]]:
    """Return the rows of each section, in the document's order."""
    return {
        section["title"]: [Row(r["areal"], r["here"], tuple(r["tests"])) for r in section["rows"]]
        for section in _read()["sections"]
    }


def render() -> str:
    read = _read()
    rows = sections()
    parts = [read["head"]]
    for section in read["sections"]:
        parts.append(f"\n## {section['title']}\n")
        if "intro" in section:
            parts.append(f"\n{section['intro']}")
        parts.append("\n| AReaL | here | shown by |\n|---|---|---|\n")
        for row in rows[section["title"]]:
            tests = ", ".join(f"`{test}`" for test in row.tests)
            parts.append(f"| {_cell(row.areal)} | {_cell(row.here)} | {tests} |\n")
    return "".join([*parts, "\n", read["tail"]])


def _read() -> dict[str, Any]:
    return dict(yaml.safe_load(_SOURCE.read_text(encoding="utf-8")))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
