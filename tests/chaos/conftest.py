"""The proofs' options and figures.

``pytest`` runs each proof in its short form (seconds), ``make chaos`` or ``pytest tests/chaos
--long`` in its long one. A proof takes ``long`` to choose how much it does and says what it
measured by ``figure("killed 100 times, 0 lost")``: the lines stand at the end of pytest's output
(tests/conftest.py writes them).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import FIGURE

Figure = Callable[[str], None]


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether the proofs were asked for in their long form (``--long``)."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Say what was measured: shown after the tests, also of a proof that fails."""
    name = request.node.name
    # They travel with the test's report, also from another process.
    said = request.node.user_properties
    return lambda text: said.append((FIGURE, f"{name}: {text}"))
