"""Weights that our trainer sends into two real SGLangs, each way, judged by log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.sync_contract import SyncContract
from tests.support.engine.updates_contract import load


@pytest.fixture
async def engines(servers: list[str], models: list[Path]) -> list[str]:
    for url in servers:
        await load(url, models[0], 0)
    return servers


class TestSync(SyncContract):
    dtype = "bfloat16"
    rounding = 0.1
    """SGLang computes in bfloat16 here."""
