"""`sessions.store_content=false`: nothing that is said reaches the disk, and everything works."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from any_agent.errors import ConfigError
from any_agent.types import Interaction
from tests.support.errors import fails_with
from tests.support.proxy import Proxy, config_for, until
from tests.support.proxy_fixtures import Start
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


def say(proxy: Proxy, engine: ScriptedEngine, text: str) -> None:
    chat = proxy.service.completer.chat
    engine.say([*chat.tokenizer.encode(text), chat.stop_token_ids[0]])


async def talk(proxy: Proxy, engine: ScriptedEngine, key: str, turns: int) -> list[dict[str, Any]]:
    """A conversation, every other turn streamed; its messages."""
    messages = list(SAID)
    for turn in range(turns):
        say(proxy, engine, f"{SECRET} in answer {turn}")
        if turn % 2:
            events, _ = await proxy.stream(key, messages, **FIELDS)
            deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
            text = "".join(d.get("content") or "" for d in deltas)
            answer = {"role": "assistant", "content": text}
        else:
            answer = (await proxy.complete(key, messages, **FIELDS))["choices"][0]["message"]
        assert SECRET in answer["content"]
        messages += [answer, {"role": "user", "content": f"{SECRET} in question {turn}"}]
    return messages


@pytest.mark.parametrize("kept", [False, True])
async def test_nothing_that_is_said_is_on_disk_or_in_memory(
    start: Start, engine: ScriptedEngine, tmp_path: Path, kept: bool
) -> None:
    settings = ("sessions.group_size=1", "sessions.min_group_size=1")
    settings = (*settings, f"sessions.store_content={str(kept).lower()}")
    proxy = await start(*settings, admit=10)
    session = await proxy.open(metadata={"mine": "the caller's"})
    key, id = session["api_key"], session["session_id"]
    messages = await talk(proxy, engine, key, 3)
    assert bool(said_on_disk(tmp_path)) is kept
    if not kept:
        await until(lambda: said_in_memory() == [])
    # Another process goes on exactly where this one was.
    proxy = await start(*settings, admit=10)
    say(proxy, engine, f"{SECRET} at last")
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
    assert trajectory.metadata == {"mine": "the caller's"}
    ids = np.concatenate([np.r_[i.prompt_delta_ids, i.output_ids] for i in trajectory.interactions])
    sent = [*engine.requests[-1]["input_ids"], *trajectory.interactions[-1].output_ids.tolist()]
    assert ids.tolist() == sent
    assert [i.reward for i in trajectory.interactions] == [None, None, None, 0.5]
    assert bool(said_on_disk(tmp_path)) is kept


async def unheard(proxy: Proxy, engine: ScriptedEngine, key: str, id: str, text: str) -> None:
    """A marked call whose client leaves before it is answered; it is recorded all the same."""
    before, sent = len(await proxy.recorded(id)), len(engine.requests)
    say(proxy, engine, text)
    go_on = engine.hold(2)
    asked = asyncio.create_task(marked(proxy, key, 0))
    await until(lambda: len(engine.requests) > sent)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    go_on.set()

    async def recorded() -> bool:
        return len(await proxy.recorded(id)) > before

    await until(recorded)


async def marked(proxy: Proxy, key: str, count: int) -> httpx.Response:
    body = {"model": "m", "messages": SAID, **FIELDS}
    headers = {"authorization": f"Bearer {key}", "x-stainless-retry-count": str(count)}
    return await proxy.http.post("/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_retry_is_told_what_was_said(
    start: Start, engine: ScriptedEngine, tmp_path: Path, restarted: bool
) -> None:
    """While the call waits for it, and by its ids in the next process."""
    proxy = await start("sessions.store_content=false", admit=10)
    session = await proxy.open()
    key, id = session["api_key"], session["session_id"]
    await unheard(proxy, engine, key, id, f"{SECRET} and lost")
    if restarted:
        proxy = await start("sessions.store_content=false")
    again = await marked(proxy, key, 1)
    assert again.json()["choices"][0]["message"]["content"] == f"{SECRET} and lost"
    assert len(engine.requests) == 1
    # What reaches nobody is put again, marked so, and without its texts again.
    await unheard(proxy, engine, key, id, f"{SECRET} to nobody")
    await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key)
    recorded = await proxy.recorded(id)
    assert [i.untrainable_reason for i in recorded] == [None, "undelivered"]
    assert said_on_disk(tmp_path) == []


def test_a_grader_needs_what_was_said(tmp_path: Path) -> None:
    with fails_with(ConfigError, "store_content"):
        config_for(
            tmp_path,
            "sessions.store_content=false",
            "sessions.late_reward=grade",
            "sessions.grader=a.b",
        )
