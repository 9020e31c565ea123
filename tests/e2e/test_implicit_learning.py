"""An agent that sets nothing but a URL and a key is trained by a grader."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from any_agent.auth.key_store import create_key
from any_agent.client.rl_client import RLClient
from any_agent.launcher import Node, NodeOptions
from any_agent.launcher.trial import trial_dir
from any_agent.protocol.rl import SessionLine
from any_agent.rundir.layout import RunDir
from tests.support.e2e.live_run import live_config

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
"""At most; about twelve are enough."""
LIMIT = 480.0
RISE = 0.15
"""Five standard deviations of a step's mean."""
SETTINGS: dict[str, object] = {
    "server.ranks": 1,
    "sampling.max_new_tokens": 6,
    "sampling.temperature": 1.0,
    "sessions.group_size": 8,
    "sessions.implicit": True,
    "sessions.implicit_idle_timeout": 4.0,
    "sessions.grader": "tests.support.e2e.letters_grader.share_of_letters",
    "rollout.batch_size": 32,
    "rollout.max_concurrent": 128,
    "train.steps": STEPS,
    "train.lr": 3e-3,
    "train.discount": 1.0,
}


def rewards_of(run: RunDir) -> list[float]:
    """Of each step that is done."""
    lines = run.metrics.read_text().split("\n")[:-1] if run.metrics.exists() else []
    return [json.loads(line)["reward"] for line in lines]


def environment(url: str, key: str) -> dict[str, str]:
    """All that the agent is told."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANY_AGENT")}
    return kept | {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}


def test_the_reward_rises_with_sessions_that_calls_open(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = live_config(tmp_path, tiny_model_dir, **SETTINGS)
    run = trial_dir(config)
    run.create()
    key = create_key(run.keys, "tenant", tenant="alice")[0]
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        script = [sys.executable, str(ROOT / "tests/support/e2e/url_agent.py")]
        agent = subprocess.Popen(script, env=environment(node.url, key))
        try:
            deadline = time.monotonic() + LIMIT
            while not has_risen(rewards := rewards_of(run)):
                node.check()
                assert agent.poll() is None, "the agent ended"
                assert time.monotonic() < deadline, rewards
                time.sleep(0.2)
            sessions = asyncio.run(listed(node.url))
        finally:
            agent.kill()
            agent.wait()
    assert {session.tenant for session in sessions} == {"alice"}
    # A conversation of two turns is one session. On a slow machine its session may end in between:
    # the second turn opens another one, or goes to one that got the same answer.
    calls = Counter(session.interactions for session in sessions if session.state == "trained")
    assert calls[2] and calls.keys() <= {1, 2, 3} and calls[3] <= calls[1], calls


def has_risen(rewards: list[float]) -> bool:
    assert len(rewards) < STEPS, rewards
    return len(rewards) >= 4 and sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + RISE


async def listed(url: str) -> list[SessionLine]:
    async with RLClient(url) as service:
        return [line async for line in service.sessions()]
