"""An agent that sets nothing but a URL and a key is trained by a grader."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from any_agent.auth.key_store import create_key
from any_agent.client.rl_client import RLClient
from any_agent.launcher import Node, NodeOptions
from any_agent.launcher.trial import trial_dir
from any_agent.protocol.rl import SessionLine
from tests.support.e2e.live_run import live_config, looked_after, steps_of
from tests.support.waiting import meanwhile, until

STEPS = 60
"""At most; about twelve are enough."""
RISE = 0.15
"""Five standard deviations of a step's mean."""
GROUP = 8
SETTINGS: dict[str, object] = {
    "server.ranks": 1,
    "sampling.max_new_tokens": 6,
    "sampling.temperature": 1.0,
    "sessions.group_size": GROUP,
    "sessions.implicit": True,
    "sessions.implicit_idle_timeout": 4.0,
    "sessions.grader": "tests.support.graders.share_of_letters",
    "rollout.batch_size": 32,
    "rollout.max_concurrent": 128,
    "train.steps": STEPS,
    "train.lr": 3e-3,
    "train.discount": 1.0,
}


async def ask(client: openai.AsyncOpenAI, worker: int) -> None:
    """Ask one question after the other, and each of them again; a group of workers asks the same.

    As somebody's agent does that knows of no session, no reward and no training.
    """
    for turn in itertools.count():
        question = f"Say something, please. ({worker // GROUP} {turn})"
        talk: list[Any] = [{"role": "user", "content": question}]
        try:
            for again in ("And another one.", "Thanks."):
                done = await client.chat.completions.create(model="gpt-4o", messages=talk)
                talk += [done.choices[0].message.to_dict(), {"role": "user", "content": again}]
        except openai.OpenAIError:
            await asyncio.sleep(0.2)


async def train(node: Node) -> list[SessionLine]:
    """Let agents work until the reward has risen; return the sessions."""

    def risen() -> bool:
        rewards = [line["reward"] for line in steps_of(node.dir)]
        assert len(rewards) < STEPS, rewards
        return len(rewards) >= 4 and sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + RISE

    async with (
        openai.AsyncOpenAI() as agents,
        RLClient(node.url) as service,
        looked_after(node),
        meanwhile(*(ask(agents, worker) for worker in range(4 * GROUP))),
    ):
        await until(risen, "more reward", within=480)
        return [line async for line in service.sessions()]


def test_the_reward_rises_with_sessions_that_calls_open(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    config = live_config(tmp_path, tiny_model_dir, **SETTINGS)
    trial_dir(config).create()
    key = create_key(trial_dir(config).keys, "tenant", tenant="alice")[0]
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{node.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", key)
        sessions = asyncio.run(train(node))
    assert {session.tenant for session in sessions} == {"alice"}
    # A conversation of two turns is one session. On a slow machine its session may end in between:
    # the second turn opens another one, or goes to one that got the same answer.
    calls = Counter(session.interactions for session in sessions if session.state == "trained")
    assert calls[2] and calls.keys() <= {1, 2, 3} and calls[3] <= calls[1], calls
