"""Streams that are taken up by a marked retry: what they say, part by part, is what is recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeAlias

import orjson
import pytest

from any_agent.chat import ChatFormat, MessageDelta, load_chat_format, merge_deltas
from any_agent.completions.encoders.output_order import OutputPart, parts_of
from any_agent.completions.messages.tool_use import tool_use_id
from any_agent.types import Interaction
from proxy_ext.calls.call import Call
from tests.proxy_ext.api.test_chat import say
from tests.support.openai_agent import CALL, CHAT_TOOLS, SCHEMA, TOOLS
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Restart
from tests.support.scripted_engine import ScriptedEngine

Events: TypeAlias = list[dict[str, Any]]

HM = "<think>\nHm, hm.\n</think>\n\n"
SAID = {
    "text, call": (f"I look for it.\n{CALL}", ["content", "call"]),
    "call, text": (f"{CALL} and that is it", ["call", "content"]),
    "text, call, text, call": (
        f"One.\n{CALL}\nTwo.\n{CALL}",
        ["content", "call", "content", "call"],
    ),
    "calls": (f"{CALL}\n{CALL}", ["call", "call"]),
    "reasoning, call": (f"{HM}{CALL}", ["reasoning", "call"]),
    "reasoning, text": (f"{HM}It is seven.", ["reasoning", "content"]),
    "reasoning, text, call": (f"{HM}I look.\n{CALL}", ["reasoning", "content", "call"]),
    "text": ("It is seven.", ["content"]),
    "nothing": ("", []),
}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
RESPONSES: dict[str, Any] = {"input": "Find it.", "tools": TOOLS}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": RESPONSES,
    "/v1/messages": {
        "messages": HELLO,
        "max_tokens": 500,
        "tools": [{"name": "find", "input_schema": SCHEMA}],
    },
    "/v1/chat/completions": {"messages": HELLO, "tools": CHAT_TOOLS, "logprobs": True},
}


@pytest.fixture(params=SAID)
def said(request: pytest.FixtureRequest) -> tuple[str, list[str]]:
    return SAID[request.param]


@pytest.fixture(scope="module")
def thinking(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir), enable_thinking=True)


@pytest.fixture
def chat(chat: ChatFormat, thinking: ChatFormat, said: tuple[str, list[str]]) -> ChatFormat:
    return thinking if said[0].startswith(HM) else chat


class Stream:
    """One agent's body at one path, sent again and again."""

    def __init__(self, path: str, session: dict[str, Any], **fields: Any) -> None:
        self.path = path
        self.id = session["session_id"]
        self.key = session["api_key"]
        self._body = orjson.dumps({"model": "m", "stream": True, **BODIES[path], **fields})

    async def events(self, proxy: Proxy, count: int) -> Events:
        headers = {"authorization": f"Bearer {self.key}", "x-stainless-retry-count": str(count)}
        events: Events = []
        asked = proxy.http.stream("POST", self.path, content=self._body, headers=headers)
        async with asked as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    events.append(orjson.loads(line.removeprefix("data: ")))
        return events

    def call(self, proxy: Proxy) -> Call:
        """Its latest one."""
        calls = proxy.service.sessions.live[self.id].calls
        return max(calls, key=lambda call: call.number)

    async def left(self, proxy: Proxy, engine: ScriptedEngine, at: int) -> asyncio.Event:
        """Sampled up to a token, without its client; what it goes on with."""
        go_on = engine.hold(at)
        before = len(engine.requests)
        asked = asyncio.create_task(self.events(proxy, 0))
        await until(lambda: len(engine.requests) > before)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: self.call(proxy).vacant, "its client is gone")
        prompt = self.call(proxy).head.prompt_tokens
        await until(lambda: self.call(proxy).cost == prompt + at, "it is held")
        return go_on

    async def replayed(self, proxy: Proxy, engine: ScriptedEngine) -> None:
        """Recorded, without a client."""
        (await self.left(proxy, engine, 0)).set()
        await until(lambda: self.call(proxy).answered, "it is recorded")

    async def joined(self, proxy: Proxy, engine: ScriptedEngine, at: int) -> Events:
        go_on = await self.left(proxy, engine, at)
        call = self.call(proxy)
        again = asyncio.create_task(self.events(proxy, 1))
        await until(lambda: not call.vacant, "it is taken up")
        go_on.set()
        return await again

    def _id_of(self, events: Events) -> str:
        first = events[0]
        named = {"/v1/responses": "response", "/v1/messages": "message"}.get(self.path)
        return str((first[named] if named else first)["id"])

    async def check(
        self, proxy: Proxy, events: Events, kinds: list[str], *, replayed: bool = False
    ) -> None:
        """What was told is what is recorded."""
        told_id = self._id_of(events)
        (interaction,) = [i for i in await proxy.recorded(self.id) if i.id == told_id]
        parts = parts_of(interaction)
        assert [part.kind for part in parts] == kinds
        if self.path == "/v1/responses":
            headers = {"authorization": f"Bearer {self.key}"}
            told = await proxy.http.get(f"{self.path}/{interaction.id}", headers=headers)
            _check_responses(events, told.json())
            if replayed:
                _check_logprobs(events)
        elif self.path == "/v1/messages":
            _check_messages(events, parts)
        else:
            _check_chat(events, interaction)


def _check_responses(events: Events, recorded: dict[str, Any]) -> None:
    assert events[-1]["response"] == recorded
    kinds = [event["type"].removeprefix("response.") for event in events]
    items = recorded["output"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == items
    added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in items]
    assert kinds.count("completed") == 1
    for k, item in enumerate(items):
        ids = {e["item_id"] for e in events if e.get("output_index") == k and "item_id" in e}
        assert ids <= {item["id"]}
        deltas = [e for e in events if e["type"].endswith(".delta") and e["output_index"] == k]
        text = "".join(e["delta"] for e in deltas)
        if item["type"] == "function_call":
            assert text == item["arguments"]
        else:
            assert text == item["content"][0]["text"]


def _check_logprobs(events: Events) -> None:
    """Those of the deltas are those of the first text."""
    texts = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
    told = [
        entry
        for event in events
        if event["type"] == "response.output_text.delta" and event["item_id"] == texts[0]["id"]
        for entry in event["logprobs"]
    ]
    if told:
        assert told == texts[0]["content"][0]["logprobs"]


def _check_messages(events: Events, parts: list[OutputPart]) -> None:
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "said": ""})
        elif event["type"] == "content_block_delta" and "signature" not in event["delta"]:
            delta = event["delta"]
            assert event["index"] == len(blocks) - 1
            kind = delta["type"].removesuffix("_delta")
            blocks[-1]["said"] += delta["partial_json" if kind == "input_json" else kind]
    told = [(b["type"], b["said"], b.get("id")) for b in blocks]
    wanted: list[Any] = []
    for part in parts:
        if part.call is not None:
            arguments = part.call["function"]["arguments"]
            wanted.append(("tool_use", arguments, tool_use_id(part.call["id"])))
        else:
            wanted.append(("text" if part.kind == "content" else "thinking", part.text, None))
    assert told == (wanted or [("text", "", None)])


def _check_chat(events: Events, interaction: Interaction) -> None:
    choices = [choice for event in events for choice in event["choices"]]
    names = ("content", "reasoning_content", "tool_calls")
    merged = merge_deltas(
        MessageDelta(*[choice["delta"].get(name) for name in names]) for choice in choices
    )
    message = interaction.output_message
    assert (merged.content or "") == (message.get("content") or "")
    assert merged.reasoning_content == message.get("reasoning_content")
    calls = [{"index": k, **call} for k, call in enumerate(message.get("tool_calls") or ())]
    assert merged.tool_calls == (calls or None)
    told = [
        entry["logprob"] for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]
    ]
    assert told == pytest.approx(interaction.output_logprobs.tolist())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.service
async def test_a_replay(
    restart: Restart,
    engine: ScriptedEngine,
    chat: ChatFormat,
    said: tuple[str, list[str]],
    path: str,
) -> None:
    """Of the process that recorded it, and of the next one."""
    text, kinds = said
    proxy = await restart()
    session = await proxy.open()
    asked = (RESPONSES, {**RESPONSES, **LOGPROBS}) if path == "/v1/responses" else ({},)
    later = [Stream(path, session, **fields) for fields in asked]
    for stream in later:
        for again in (False, True):
            say(engine, chat, text)
            await stream.replayed(proxy, engine)
            if not again:
                await stream.check(proxy, await stream.events(proxy, 1), kinds, replayed=True)
    proxy = await restart()
    for stream in later:
        await stream.check(proxy, await stream.events(proxy, 1), kinds, replayed=True)
    assert len(engine.requests) == 2 * len(later)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.service
async def test_a_stream_that_goes_on(
    restart: Restart,
    engine: ScriptedEngine,
    chat: ChatFormat,
    said: tuple[str, list[str]],
    path: str,
) -> None:
    """Taken up anywhere in it."""
    text, kinds = said
    proxy = await restart()
    session = await proxy.open()
    more = LOGPROBS if path == "/v1/responses" else {}
    length = len(say(engine, chat, text))
    engine.hush()
    for k, at in enumerate(range(1, length, 5)):
        stream = Stream(path, session, **(more if k % 2 else {}))
        say(engine, chat, text)
        await stream.check(proxy, await stream.joined(proxy, engine, at), kinds)
