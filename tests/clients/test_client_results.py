"""docs/reference/compatibility.md, results.json and what the live tests fill are in step."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.clients.results import RESULTS, WORKS, Results
from tests.clients.shipped.agents import AGENTS

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "tools" / "docs"
EACH = {"plain", "streaming", "three turns", "tools", "streamed tools", "errors"}
"""Tried with every client over every API that it speaks."""


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("client_results")


def live_modules() -> list[ModuleType]:
    files = sorted(HERE.glob("*/*_live.py"))
    return [importlib.import_module(f"tests.clients.{f.parent.name}.{f.stem}") for f in files]


def cells_of(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Client, API and feature, for each cell that a module's tests fill."""
    for name, test in vars(module).items():
        if not name.startswith("test_"):
            continue
        for mark in getattr(test, "pytestmark", ()):
            if mark.name == "fills":
                each = "api" in inspect.signature(test).parameters
                apis = module.APIS if each else (mark.kwargs["api"],)
                yield from ((c.name, a, f) for c in module.CLIENTS for a in apis for f in mark.args)


def recorded_cells() -> Iterator[tuple[str, str, str]]:
    for client, apis in Results.read().cells.items():
        yield from ((client, api, feature) for api, row in apis.items() for feature in row)


def test_the_document_is_up_to_date(document: ModuleType) -> None:
    text = (DOCS.parents[1] / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
    assert text == document.render(), "run python tools/docs/generate.py"


def test_results_are_of_the_live_tests() -> None:
    wanted = {cell for module in live_modules() for cell in cells_of(module)}
    assert set(recorded_cells()) == wanted, "run make verify SUITES=clients ARGS=--record"


def test_results_are_of_the_pinned_versions() -> None:
    filling = [module for module in live_modules() if any(cells_of(module))]
    clients = {client.name: client for module in filling for client in module.CLIENTS}
    recorded = {name: about["version"] for name, about in Results.read().clients.items()}
    assert recorded == {name: client.version for name, client in clients.items()}


def test_results_have_every_shipped_agent_at_its_pinned_version() -> None:
    recorded = {name: about["version"] for name, about in Results.read().agents.items()}
    assert recorded == {agent.name: agent.version for agent in AGENTS}


def test_every_client_is_tried_in_what_matters() -> None:
    for client, apis in Results.read().cells.items():
        for api, row in apis.items():
            # Prompts have no turns and no tools.
            least = {"plain", "streaming"} if api == "completions" else EACH
            assert least <= row.keys(), (client, api)


def test_every_package_is_pinned() -> None:
    for pins in HERE.glob("*/*.txt"):
        assert all(re.fullmatch(r"\S+==\S+", line) for line in pins.read_text().splitlines()), pins
    for manifest in HERE.glob("*/package.json"):
        wanted = json.loads(manifest.read_text())["dependencies"]
        locked = json.loads(manifest.with_name("package-lock.json").read_text())["packages"]
        assert locked[""]["dependencies"] == wanted, manifest
        assert all("integrity" in package for name, package in locked.items() if name), manifest


def test_a_cell_that_does_not_work_shows_its_reason(
    document: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    client = next(iter(results["cells"]))
    results["cells"][client]["chat"] = {"plain": WORKS, "tools": "It calls home."}
    changed = tmp_path / "results.json"
    changed.write_text(json.dumps(results), encoding="utf-8")
    monkeypatch.setattr(document, "RESULTS", changed)
    chat = document.render().partition("## Chat Completions")[2].partition("\n## ")[0]
    assert re.search(r"^\| tools \|.* 1 \|", chat, re.M)
    assert chat.rstrip().endswith("\n1. It calls home.")


def test_results_that_differ_are_named() -> None:
    recorded = Results(clients={"one": {"version": "1"}}, cells={"one": {"chat": {"plain": WORKS}}})
    assert not Results(cells={"one": {"chat": {"plain": WORKS}}}).differing(recorded)
    worse = Results(cells={"one": {"chat": {"plain": "fails"}}}).differing(recorded)
    assert worse == ["one: chat, plain: fails; recorded is works"]
    newer = Results(clients={"one": {"version": "2"}}).differing(recorded)
    assert newer == ["one: {'version': '2'}; recorded is {'version': '1'}"]
    slower = Results(agents={"one": {"calls": 2}}).differing(Results(agents={"one": {"calls": 1}}))
    assert slower == ["one: {'calls': 2}; recorded is {'calls': 1}"]
    over = Results(cells={"two": {"chat": {"plain": WORKS}}}).over(recorded)
    assert over.cells.keys() == {"one", "two"}
