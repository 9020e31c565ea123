"""The same conversations, by the direct client and through a proxy: the same record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from any_agent import EngineOpenAI
from any_agent.chat import ChatFormat
from any_agent.record import InteractionTree, export_rows
from any_agent.types import Interaction
from tests.direct.conftest import Make
from tests.support.direct import CALL, HELLO, MODEL, MORE, TOOLS, said
from tests.support.proxy import Proxy, config_for, running_proxy
from tests.support.scripted_engine import ScriptedEngine

THOUGHT = "<think>\nLet me see.\n</think>\n\nIt is 7."
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "plain": (["It is 5.", "And 6.", "7"], {}),
    "tools": ([CALL, "It is 5.", CALL], {"tools": TOOLS}),
    "reasoning": ([THOUGHT, "It is 8."], {}),
    "two choices": (["a", "b", "c", "d"], {"n": 2}),
    "cut off": (["one two three four", "five"], {"max_tokens": 4}),
    "a stop string": (["one two three", "four two"], {"stop": ["two"]}),
    "an agent's own sampling": (["1", "2"], {"temperature": 0.3, "seed": 5, "user": "me"}),
    "likeliest tokens": (["one", "two"], {"logprobs": True, "top_logprobs": 2}),
}
NEVER_THE_SAME = {"id", "session_id", "parent_id", "created_at"}


@pytest.fixture
async def proxy(tmp_path: Path, chat: ChatFormat, engine: ScriptedEngine) -> AsyncIterator[Proxy]:
    config = config_for(tmp_path)
    async with running_proxy(config, chat, engine_url=engine.url) as proxy:
        await proxy.admit(100)
        yield proxy


async def talk(
    client: openai.AsyncOpenAI, engine: ScriptedEngine, chat: ChatFormat, case: str, stream: bool
) -> None:
    """Calls until all is said; the first choice is gone on from."""
    texts, fields = CASES[case]
    messages, n = list(HELLO), fields.get("n", 1)
    for k in range(0, len(texts), n):
        for text in texts[k : k + n]:
            engine.say(said(chat, text))
        asked = {"model": MODEL, "messages": messages, **fields}
        if stream:
            message = await streamed(client, asked)
        else:
            whole = await client.chat.completions.create(**asked)
            message = whole.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "5"}
            for call in message.get("tool_calls") or ()
        ]
        messages.append(MORE)


async def streamed(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> dict[str, Any]:
    """The first choice's message, put together by hand."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        if choice.index:
            continue
        delta = choice.delta
        message["content"] += delta.content or ""
        if reasoning := getattr(delta, "reasoning_content", None):
            message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
        for part in delta.tool_calls or ():
            calls = message.setdefault("tool_calls", [])
            if part.id:
                calls.append({"id": part.id, "type": "function", "function": {"arguments": ""}})
            told = calls[part.index]["function"]
            if part.function is not None:
                if part.function.name:
                    told["name"] = part.function.name
                told["arguments"] += part.function.arguments or ""
    return message


def by_choice(interactions: list[Interaction]) -> list[Interaction]:
    """Choices of one call are recorded as they end: by their index."""
    order = {i.id: k for k, i in enumerate(interactions)}
    first = {i.id.partition(".")[0]: order[i.id] for i in reversed(interactions)}
    return sorted(interactions, key=lambda i: (first[i.id.partition(".")[0]], i.id))


def comparable(interactions: list[Interaction]) -> list[dict[str, Any]]:
    """Without what is each one's own; ids by their order."""
    names: dict[str | None, Any] = {None: None}
    names |= {i.id: k for k, i in enumerate(interactions)}
    calls: dict[str, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, dict):
            return {
                k: calls.setdefault(v, len(calls)) if k in ("id", "tool_call_id") else plain(v)
                for k, v in value.items()
            }
        return [plain(v) for v in value] if isinstance(value, list) else value

    out = []
    for i in interactions:
        own = {f.name: plain(getattr(i, f.name)) for f in fields(i)}
        own = {k: v for k, v in own.items() if k not in NEVER_THE_SAME}
        out.append(own | {"parent": names[i.parent_id]})
    return out


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("mode", ["train", pytest.param("eval", marks=pytest.mark.service)])
@pytest.mark.parametrize("case", CASES)
async def test_the_direct_client_records_what_the_proxy_records(
    proxy: Proxy,
    make: Make,
    engine: ScriptedEngine,
    chat: ChatFormat,
    case: str,
    mode: str,
    stream: bool,
) -> None:
    texts, _ = CASES[case]
    session = await proxy.open(mode=mode)
    direct: EngineOpenAI = make(mode=mode, sampling=proxy.service.sampling)
    async with openai.AsyncOpenAI(
        base_url=session["base_url"], api_key=session["api_key"]
    ) as remote:
        for client in (remote, direct):
            await talk(client, engine, chat, case, stream)
    by_proxy = by_choice(await proxy.recorded(session["session_id"]))
    ours = by_choice(direct.interactions)
    assert comparable(ours) == comparable(by_proxy)
    # What the engine was asked for, but the requests' names.
    sent = [{k: v for k, v in request.items() if k != "rid"} for request in engine.requests]
    assert sent[len(texts) :] == sent[: len(texts)]
    # And what would be trained on, masks and versions with it.
    direct.set_final_reward(1.0)
    discount = direct.apply_reward_discount(0.9)
    tree = InteractionTree.from_interactions(by_proxy)
    theirs = export_rows(tree, dict.fromkeys((i.id for i in by_proxy), 0.0), "individual")
    exported = direct.export_interactions()
    for mine, other in zip(ours, by_proxy, strict=True):
        row = exported[mine.id].row
        for name in ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask"):
            assert row[name].tolist() == theirs[other.id][name].tolist(), name
    assert set(discount) == {i.id for i in ours}
