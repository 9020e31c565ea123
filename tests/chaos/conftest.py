"""The proofs' options and figures.

``pytest`` runs each proof in its short form (seconds), ``make chaos`` or ``pytest tests/chaos
--long`` in its long one. A proof takes ``long`` to choose how much it does and says what it
measured by ``figure("killed 100 times, 0 lost")``: the lines stand at the end of pytest's output.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

Figure = Callable[[str], None]
_FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = []


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether the proofs were asked for in their long form (``--long``)."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Say what was measured: shown after the tests, also of a proof that fails."""
    lines = request.config.stash[_FIGURES]
    name = request.node.name
    return lambda text: lines.append(f"{name}: {text}")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash[_FIGURES]
    if lines:
        form = "long" if config.getoption("--long") else "short"
        terminalreporter.section(f"figures of the proofs ({form} form)")
        for line in lines:
            terminalreporter.write_line(line)
