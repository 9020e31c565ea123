"""Streams that are taken up by a marked retry: what they say, part by part, is what is recorded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.completions.encoders.output_order import parts_of
from proxy_ext.calls.call import Call
from tests.proxy_ext.api.test_chat import say
from tests.support.laws.apis import APIS, CHAT, RESPONSES, Api, Asked
from tests.support.laws.apis.given import events_of
from tests.support.laws.record import heard
from tests.support.openai_agent import CALL, CHAT_TOOLS
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Restart
from tests.support.scripted_engine import ScriptedEngine

HM = "<think>\nHm, hm.\n</think>\n\n"
SAID: dict[str, list[str]] = {
    f"I look for it.\n{CALL}": ["content", "call"],
    f"{CALL} and that is it": ["call", "content"],
    f"One.\n{CALL}\nTwo.\n{CALL}": ["content", "call", "content", "call"],
    f"{CALL}\n{CALL}": ["call", "call"],
    f"{HM}{CALL}": ["reasoning", "call"],
    f"{HM}It is seven.": ["reasoning", "content"],
    f"{HM}I look.\n{CALL}": ["reasoning", "content", "call"],
    "It is seven.": ["content"],
    "": [],
}
KINDS = {"message": "content", "text": "content", "thinking": "reasoning", "reasoning": "reasoning"}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
SPOKEN = pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
pytestmark = pytest.mark.service


@pytest.fixture(params=SAID, ids=lambda text: ", ".join(SAID[text]) or "nothing")
def said(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def thinking(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir), enable_thinking=True)


@pytest.fixture
def chat(chat: ChatFormat, thinking: ChatFormat, said: str) -> ChatFormat:
    return thinking if said.startswith(HM) else chat


class Stream:
    """One agent's body at one API, sent again and again."""

    def __init__(self, api: Api, session: dict[str, Any], **fields: Any) -> None:
        self.api = api
        self.id, self.key = session["session_id"], session["api_key"]
        more = {"logprobs": True} if api is CHAT else fields
        self._body = api.body(Asked(HELLO, CHAT_TOOLS, stream=True, fields=more))

    async def ask(self, proxy: Proxy, count: int) -> bytes:
        marked = {"x-stainless-retry-count": str(count)}
        answer = await proxy.post(self.api.path, self._body, self.key, **marked)
        assert answer.status_code == 200, answer.text
        return answer.content

    def call(self, proxy: Proxy) -> Call:
        """Its latest one."""
        calls = proxy.service.sessions.live[self.id].calls
        return max(calls, key=lambda call: call.number)

    async def left(self, proxy: Proxy, engine: ScriptedEngine, at: int) -> asyncio.Event:
        """Sampled up to a token, without its client; what it goes on with."""
        go_on = engine.hold(at)
        before = len(engine.requests)
        asked = asyncio.create_task(self.ask(proxy, 0))
        await until(lambda: len(engine.requests) > before)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: self.call(proxy).vacant, "its client is gone")
        prompt = self.call(proxy).head.prompt_tokens
        await until(lambda: self.call(proxy).cost == prompt + at, "it is held")
        return go_on

    async def check(self, proxy: Proxy, data: bytes, kinds: list[str], *, again: bool) -> None:
        """What was told is what is recorded. ``again``: of a recorded answer."""
        (given,) = self.api.streamed(data)
        (node,) = [i for i in await proxy.recorded(self.id) if i.id == given.interaction]
        assert heard(given) == heard(node.output_message)
        assert [part.kind for part in parts_of(node)] == kinds
        events = [event for _, event in events_of(data) if event is not None]
        if self.api is CHAT:
            choices = [c for e in events for c in e["choices"] if c["logprobs"]]
            told = [entry["logprob"] for c in choices for entry in c["logprobs"]["content"]]
            assert told == pytest.approx(node.output_logprobs.tolist())
            return
        order = [KINDS.get(part["type"], "call") for part in given.raw]
        assert order == (kinds or ["content"])
        if self.api is not RESPONSES:
            return
        headers = {"authorization": f"Bearer {self.key}"}
        stored = await proxy.http.get(f"{self.api.path}/{node.id}", headers=headers)
        assert stored.json() == given.whole
        texts = [item for item in given.raw if item["type"] == "message"]
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        entries = [x for e in deltas if e["item_id"] == texts[0]["id"] for x in e["logprobs"]]
        if again and entries:
            assert entries == texts[0]["content"][0]["logprobs"]


@SPOKEN
async def test_a_stream_is_replayed_the_same_by_this_process_and_the_next(
    restart: Restart, engine: ScriptedEngine, chat: ChatFormat, said: str, api: Api
) -> None:
    proxy = await restart()
    session = await proxy.open()
    asked: tuple[dict[str, Any], ...] = ({}, LOGPROBS) if api is RESPONSES else ({},)
    later = [Stream(api, session, **fields) for fields in asked]
    for stream in later:
        for first in (True, False):
            say(engine, chat, said)
            (await stream.left(proxy, engine, 0)).set()
            await until(lambda s=stream: s.call(proxy).answered, "it is recorded")
            if first:
                await stream.check(proxy, await stream.ask(proxy, 1), SAID[said], again=True)
    proxy = await restart()
    for stream in later:
        await stream.check(proxy, await stream.ask(proxy, 1), SAID[said], again=True)
    assert len(engine.requests) == 2 * len(later)


@SPOKEN
async def test_a_stream_is_taken_up_anywhere_in_it(
    restart: Restart, engine: ScriptedEngine, chat: ChatFormat, said: str, api: Api
) -> None:
    proxy = await restart()
    session = await proxy.open()
    more = LOGPROBS if api is RESPONSES else {}
    length = len(say(engine, chat, said))
    engine.hush()
    for k, at in enumerate(range(1, length, 5)):
        stream = Stream(api, session, **(more if k % 2 else {}))
        say(engine, chat, said)
        go_on = await stream.left(proxy, engine, at)
        call = stream.call(proxy)
        again = asyncio.create_task(stream.ask(proxy, 1))
        await until(lambda call=call: not call.vacant, "it is taken up")
        go_on.set()
        await stream.check(proxy, await again, SAID[said], again=False)
