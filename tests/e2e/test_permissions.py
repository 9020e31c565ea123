"""The files of a run are its owner's alone, whoever wrote them and with any umask."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from any_agent.launcher import Node, NodeOptions
from tests.support.e2e.live_run import drive, live_config


@pytest.fixture
def umask() -> Iterator[None]:
    """The one that takes nothing away: all that others may not do, the files say themselves."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_nobody_else_can_read_a_run(umask: None, tmp_path: Path, tiny_model_dir: Path) -> None:
    config = live_config(
        tmp_path,
        tiny_model_dir,
        **{
            "train.steps": 2,
            "server.ranks": 1,
            "train.checkpoint_every": 1,
        },
    )
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        asyncio.run(drive(node, agents=8))
        run = node.dir
    found = [run.path, *run.path.rglob("*")]
    names = {path.name for path in found}
    expected = {
        "rank-0.sqlite",
        "secret.key",
        "metrics.jsonl",
        "trainer.log",
        "rank-0.log",
        "model.safetensors",
        "optimizer.safetensors",
        "url",
        "config.yaml",
        "state.json",
        "latest",
    }
    assert expected <= names
    assert any(path.parent == run.manifests for path in found)
    open_to_others = [
        f"{path.relative_to(run.path)} {path.stat().st_mode & 0o777:o}"
        for path in found
        if path.stat().st_mode & 0o077
    ]
    assert open_to_others == []
