"""The steps of clients fill the cells of docs/reference/compatibility.md.

`make verify SUITES=clients` fails where a cell is not as results.json has it; with `ARGS=--record`
it writes the file, and the document after it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.live import Live, live_service
from tests.clients.results import WORKS, Results

GENERATE = Path(__file__).resolve().parents[2] / "tools" / "docs" / "generate.py"
_FOUND = pytest.StashKey[Results]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FOUND] = Results()


@pytest.fixture(scope="session")
def live(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_service(tiny_model_dir, tmp_path_factory.mktemp("live")) as service:
        yield service


@pytest.fixture(scope="module")
def training(live: Live) -> Iterator[Live]:
    """It opens train sessions, as if a trainer were there."""
    live.put("run", {"state": "training"})
    live.put("capacity", {"limit": 1000, "ttl": 3600, "owner": "clients"})
    yield live
    live.put("run", {"state": "serving"})


@pytest.fixture
def found(request: pytest.FixtureRequest) -> Results:
    """The results of this run's tests so far."""
    return request.config.stash[_FOUND]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    given = (
        item.callspec.params
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else {}
    )
    if "step" in given and (outcome := _outcome(report)) is not None:
        for feature in given["step"].fills:
            item.config.stash[_FOUND].note(given["client"][0], given["api"], feature, outcome)
    return report


def _outcome(report: pytest.TestReport) -> str | None:
    if report.failed:
        return f"fails in {report.nodeid.rpartition('::')[2]}"
    return WORKS if report.when == "call" and report.passed else None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    found, recorded = session.config.stash[_FOUND], Results.read()
    if session.config.getoption("record", default=False):
        found.over(recorded).write()
        subprocess.run([sys.executable, GENERATE], check=True, timeout=120)
    elif not session.testsfailed and found.differing(recorded):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash[_FOUND].differing(Results.read()):
        terminalreporter.write_line(f"not as recorded: {line}", red=True)
