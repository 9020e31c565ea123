"""Runs the documents' code block by block, and prints what became of each.

A test names its block by ``@pytest.mark.block(document, first, last)``, ``changes`` says what was
changed in it beside import names: a placeholder's value, or what the text leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.documents import text
from tests.documents.service import EXPERIMENT, TRIAL, USER, Service, settings
from tests.support import taught_models
from tests.support.e2e.serving import serve

_ROWS = pytest.StashKey[list[tuple[int, int, int, str, str, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []
    config.addinivalue_line(
        "markers", "block(document, first, last, changes=''): the lines that a test runs"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if text.present():
        return
    why = f"the documents are not in {text.FOLDER}: set ANY_AGENT_DOCUMENTS to their folder"
    for item in items:
        if item.get_closest_marker("block") is not None:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" or report.failed:
        for mark in item.iter_markers("block"):
            row = (*mark.args, mark.kwargs.get("changes", ""), item.name, report.outcome)
            item.config.stash[_ROWS].append(row)
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    rows = sorted(set(config.stash[_ROWS]))
    if not rows:
        return
    terminalreporter.section("the documents' blocks")
    for document, first, last, changes, name, outcome in rows:
        line = f"{document:03d} {first:>4}-{last:<4} {outcome:7} {name}"
        terminalreporter.write_line(line + (f"  [{changes}]" if changes else ""))
    failed = sum(row[-1] != "passed" for row in rows)
    terminalreporter.write_line(f"{len(rows)} blocks, {failed} failed")


@pytest.fixture(scope="session")
def taught_model() -> Path:
    """A tiny model that adds numbers up to 4, right about every second time."""
    return taught_models.taught_model("sums")


@pytest.fixture(scope="session")
def service(taught_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with serve(*settings(taught_model), cwd=folder) as served:
        found = Service(served.url, taught_model, folder)
        assert (found.run).is_dir(), (EXPERIMENT, TRIAL, USER)
        yield found


@pytest.fixture
def code(request: pytest.FixtureRequest) -> str:
    """The block's code, with import names of this project."""
    mark = request.node.get_closest_marker("block")
    return text.renamed(text.cut(*mark.args[:3]))
