from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.archives import Rank


@pytest.fixture
async def rank(tmp_path: Path) -> AsyncIterator[Rank]:
    rank = await Rank(tmp_path / "u" / "e" / "t").start()
    yield rank
    await rank.stop()
