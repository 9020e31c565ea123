from __future__ import annotations

import pytest

from tests.support.records import Make, make_interaction


@pytest.fixture(scope="session")
def make() -> Make:
    return make_interaction
