"""`sessions.store_content=false`: nothing that is said reaches the disk, and everything works."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from any_agent.types import Interaction
from tests.support.implicit import will_say
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.retries import Agent, agent_of, text_of
from tests.support.scripted_engine import ScriptedEngine

SECRET = "planted"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": f"{SECRET} in a tool", "parameters": {}},
    }
]
SAID = [
    {"role": "system", "content": f"{SECRET} in a system prompt"},
    {"role": "user", "content": f"{SECRET} in a question"},
]
FIELDS: dict[str, Any] = {
    "tools": TOOLS,
    "user": f"{SECRET} in a parameter",
    "stop": [f"{SECRET} in a stop string"],
    "max_tokens": 40,
}


def said_on_disk(root: Path) -> list[str]:
    """The files of the run in which something of it can be found."""
    return [
        str(file)
        for file in root.rglob("*")
        if file.is_file() and SECRET.encode() in file.read_bytes()
    ]


def said_in_memory() -> list[Interaction]:
    """Recorded interactions that still hold something of it."""
    gc.collect()
    kept = [o for o in gc.get_objects() if isinstance(o, Interaction)]
    return [i for i in kept if SECRET in repr((i.message_delta, i.output_message, i.tools))]


async def talk(proxy: Proxy, engine: ScriptedEngine, key: str, turns: int) -> list[dict[str, Any]]:
    """A conversation, every other turn streamed; its messages."""
    messages = list(SAID)
    for turn in range(turns):
        will_say(engine, proxy, f"{SECRET} in answer {turn}")
        if turn % 2:
            events, _ = await proxy.stream(key, messages, **FIELDS)
            answer = {"role": "assistant", "content": text_of(events)}
        else:
            answer = (await proxy.complete(key, messages, **FIELDS))["choices"][0]["message"]
        assert SECRET in answer["content"]
        messages += [answer, {"role": "user", "content": f"{SECRET} in question {turn}"}]
    return messages


@pytest.mark.parametrize("kept", [False, True])
async def test_without_kept_texts_nothing_said_is_on_disk_or_in_memory(
    start: Start, engine: ScriptedEngine, tmp_path: Path, kept: bool
) -> None:
    settings = ("sessions.group_size=1", "sessions.min_group_size=1")
    settings = (*settings, f"sessions.store_content={str(kept).lower()}")
    proxy = await start(*settings, admit=10)
    session = await proxy.open(task_id="t", metadata={"mine": ["the caller's", None]})
    key, id = session["api_key"], session["session_id"]
    messages = await talk(proxy, engine, key, 3)
    assert bool(said_on_disk(tmp_path)) is kept
    if not kept:
        await until(lambda: said_in_memory() == [])
    # Another process goes on exactly where this one was.
    proxy = await start(*settings, admit=10)
    will_say(engine, proxy, f"{SECRET} at last")
    last = await proxy.complete(key, messages, **FIELDS)
    recorded = await proxy.recorded(id)
    assert [i.parent_id for i in recorded] == [None, *(i.id for i in recorded[:-1])]
    before = [*engine.requests[-2]["input_ids"], *recorded[2].output_ids.tolist()]
    assert engine.requests[-1]["input_ids"][: len(before)] == before
    # Rewards, export and training have what they need.
    reward = {"reward": 0.5, "completion_id": last["id"]}
    assert (await proxy.post("/rl/v1/set_reward", reward, key)).status_code == 200
    await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key)
    (trajectory,) = await proxy.lease()
    assert (trajectory.task_id, trajectory.metadata) == ("t", {"mine": ["the caller's", None]})
    ids = np.concatenate([np.r_[i.prompt_delta_ids, i.output_ids] for i in trajectory.interactions])
    sent = [*engine.requests[-1]["input_ids"], *trajectory.interactions[-1].output_ids.tolist()]
    assert ids.tolist() == sent
    assert [i.reward for i in trajectory.interactions] == [None, None, None, 0.5]
    assert bool(said_on_disk(tmp_path)) is kept


async def unheard(agent: Agent, text: str) -> None:
    """A marked call whose client leaves before it is answered; it is recorded all the same."""
    will_say(agent.engine, agent.proxy, text)
    go_on = agent.engine.hold(2)
    await agent.leave(0)
    await agent.vacant()
    go_on.set()
    await agent.answered()


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_retry_is_answered_although_texts_are_not_kept(
    start: Start, engine: ScriptedEngine, tmp_path: Path, restarted: bool
) -> None:
    """While the call waits for it, and by its ids in the next process."""
    proxy = await start("sessions.store_content=false", admit=10)
    agent = await agent_of(proxy, engine, messages=SAID, **FIELDS)
    await unheard(agent, f"{SECRET} and lost")
    if restarted:
        agent.proxy = await start("sessions.store_content=false")
    again = await agent.ask(1)
    assert again.json()["choices"][0]["message"]["content"] == f"{SECRET} and lost"
    assert len(engine.requests) == 1
    # What reaches nobody is put again, marked so, and without its texts again.
    await unheard(agent, f"{SECRET} to nobody")
    assert await agent.end() == [None, "undelivered"]
    assert said_on_disk(tmp_path) == []
