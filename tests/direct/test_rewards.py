"""Rewards of what the direct client recorded, and its exported forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from any_agent import EngineOpenAI, InteractionWithTokenLogpReward
from any_agent.chat import ChatFormat
from any_agent.config import TrainConfig
from any_agent.errors import InvalidRequest, NotFound, Unprocessable
from tests.direct.conftest import Make
from tests.support.direct import HELLO, MODEL, MORE, said
from tests.support.errors import fails_with
from tests.support.scripted_engine import ScriptedEngine
from trainer.advantage import group_advantages
from trainer.batch import session_rewards


async def talk(client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat, turns: int) -> None:
    messages = list(HELLO)
    for turn in range(turns):
        engine.say(said(chat, f"It is {turn}."))
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        messages += [answer.choices[0].message.model_dump(), MORE]


def rewards_of(applied: dict[str, InteractionWithTokenLogpReward]) -> dict[str, float | None]:
    return {id: one.reward for id, one in applied.items()}


async def test_the_documents_worked_example_gives_its_advantages(
    make: Make, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    """Discount 0.9; sessions right; wrong then right; wrong, wrong; wrong, wrong."""
    clients, r = [], []
    for turns, last in ((1, 1), (2, 1), (2, 0), (2, 0)):
        client = make()
        await talk(client, engine, chat, turns)
        client.set_last_reward(last)
        clients.append(client)
        r.append([one.reward for one in client.apply_reward_discount(0.9).values()])
    assert r == [[1.0], [0.9, 1.0], [0.0, 0.0], [0.0, 0.0]]
    for client, rewards in zip(clients, r, strict=True):
        exported = client.export_interactions(style="individual")
        assert [e.reward for e in exported.values()] == rewards
        assert [float(e.row["rewards"]) for e in exported.values()] == pytest.approx(rewards)
    # The trainer gets own rewards, and comes to the same.
    episode = [client.trajectory(group_id="g") for client in clients]
    of_sessions = [
        session_rewards(trajectory, TrainConfig(discount=0.9))  # type: ignore[call-arg]
        for trajectory in episode
    ]
    (group,) = group_advantages([of_sessions])
    assert group.baseline == pytest.approx(0.4875)
    advantages = [[round(a, 2) for a in session] for session in group.advantages]
    assert advantages == [[0.91], [0.73, 0.91], [-0.87, -0.87], [-0.87, -0.87]]


async def test_rewards_are_replaced_and_discounts_too(
    client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    await talk(client, engine, chat, 3)
    first, second, third = (i.id for i in client.interactions)
    client.set_reward(first, 0.5)
    client.set_last_reward(np.float32(1.0))  # type: ignore[arg-type]
    assert rewards_of(client.apply_reward_discount()) == {first: 1.5, second: 1.0, third: 1.0}
    client.set_last_reward(2)
    assert rewards_of(client.apply_reward_discount(0.5)) == {first: 1.0, second: 1.0, third: 2.0}
    assert [i.reward for i in client.interactions] == [0.5, None, 2.0]
    client.set_final_reward(1)
    exported = client.export_interactions()
    assert [e.reward for e in exported.values()] == [1.25, 1.5, 3.0]
    trajectory = client.trajectory(task_id="t", metadata={"k": 1})
    assert (trajectory.final_reward, trajectory.group_id) == (1.0, client.session_id)
    assert [i.reward for i in trajectory.interactions] == [0.5, None, 2.0]
    client.set_reward(first, 9)
    assert trajectory.interactions[0].reward == 0.5


async def test_wrong_rewards_discounts_and_styles_are_refused(client: EngineOpenAI) -> None:
    with fails_with(Unprocessable, "no completion"):
        client.set_last_reward(1)
    with fails_with(NotFound, "chatcmpl-x"):
        client.set_reward("chatcmpl-x", 1)
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, n=2, max_tokens=2)
    for set_it in (lambda: client.set_reward(answer.id, 1), lambda: client.set_last_reward(1)):
        with fails_with(InvalidRequest, f"{answer.id}.0", code="choice_needed"):
            set_it()
    for bad in (math.nan, math.inf, 2e6, "1", None, [1]):
        with fails_with(InvalidRequest, param="reward"):
            client.set_reward(f"{answer.id}.0", bad)  # type: ignore[arg-type]
        with fails_with(InvalidRequest, param="reward"):
            client.set_final_reward(bad)  # type: ignore[arg-type]
    for discount in (-0.1, 1.1, math.nan, "x"):
        with fails_with(InvalidRequest, "0 and 1"):
            client.apply_reward_discount(discount)  # type: ignore[arg-type]
    with fails_with(InvalidRequest, param="style"):
        client.export_interactions(style="tree")  # type: ignore[arg-type]
    client.set_reward(f"{answer.id}.1", 1)
    assert [i.reward for i in client.interactions] == [None, 1.0]


async def test_a_path_that_is_not_exact_is_no_concat(
    client: EngineOpenAI, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    await talk(client, engine, chat, 1)
    said_before = client.interactions[0].output_message
    # Nothing new behind the answer: it cannot be gone on from.
    await client.chat.completions.create(model=MODEL, messages=[*HELLO, said_before], max_tokens=2)
    assert client.interactions[1].branch_reason == "no_new_message"
    with fails_with(Unprocessable, "individual"):
        client.export_interactions("concat")
    assert len(client.export_interactions("individual")) == 2
