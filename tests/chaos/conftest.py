"""The proofs' options and figures.

``pytest`` runs each proof in its short form (seconds), ``make chaos`` or ``pytest tests/chaos
--long`` in its long one. A proof takes ``long`` to choose how much it does and says what it
measured by ``figure("killed 100 times, 0 lost")``: the lines stand at the end of pytest's output.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

Figure = Callable[[str], None]
_NAME = "figure"


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether the proofs were asked for in their long form (``--long``)."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Say what was measured: shown after the tests, also of a proof that fails."""
    said = request.node.user_properties
    return lambda text: said.append((_NAME, text))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    # From the reports, because the tests may have run in other processes.
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {text}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, text in report.user_properties
        if name == _NAME
    ]
    if lines:
        form = "long" if config.getoption("--long") else "short"
        terminalreporter.section(f"figures of the proofs ({form} form)")
        for line in lines:
            terminalreporter.write_line(line)
