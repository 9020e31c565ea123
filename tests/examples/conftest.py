"""Examples are run on a tiny model, which is made before the clock of the first one starts."""

from __future__ import annotations

import pytest

from tests.support.taught_models import taught_model


@pytest.fixture(scope="module", autouse=True)
def _model(request: pytest.FixtureRequest) -> None:
    if request.path.name.endswith("_live.py"):
        taught_model("sums")
