"""A clean stop in the middle of training keeps every step that was made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

from any_agent.launcher import Node, NodeOptions
from any_agent.launcher.trial import latest_weights
from tests.e2e.live_run import drive, live_config


def steps_of(node: Node) -> list[int]:
    metrics = node.dir.metrics
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines]


async def some_steps(node: Node) -> None:
    """Agents work until two steps are made; then they are gone."""
    work = asyncio.create_task(drive(node, agents=8))
    deadline = time.monotonic() + 120
    while len(await asyncio.to_thread(steps_of, node)) < 2 and time.monotonic() < deadline:
        await asyncio.wait([work], timeout=0.1)
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


def test_a_stop_keeps_the_steps_made(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = live_config(tmp_path, tiny_model_dir, **{"train.steps": 1000})
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        asyncio.run(some_steps(node))
    made = steps_of(node)[-1]
    saved = latest_weights(config)
    assert made >= 2
    assert saved is not None
    assert saved.step == made
