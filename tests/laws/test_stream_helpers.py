"""What the official SDKs' stream helpers put together is the object that the whole answer is.

Each answer is sampled twice, of the same tokens: once for a stream, once whole. The short form
tries one family, the long one all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.support.errors import fails_with
from tests.support.families import Call, Family, family
from tests.support.laws.cases import FAMILIES, label
from tests.support.laws.service import Lab, lab_of
from tests.support.laws.talk import TOOLS
from tests.support.proxy import LIMIT

FEW = [("qwen3", True)]
ASK = "What is 1 + 2?"
TEXT = "né? 🙂 日本語 👩‍👩‍👧"
"""Its characters are split over tokens."""
ADD = Call("add", {"a": 1, "city": "né 🙂"})
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Said:
    """An answer that is said both ways."""

    ids: Callable[[Family], list[int]]
    tools: bool = False
    reasons: bool = False
    """Whether only a model that reasons can say it."""
    cut: int = 0
    """Tokens of its end that the request leaves no room for."""
    stop: str | None = None


def _then(fam: Family, text: str) -> list[int]:
    """A call, and text after it."""
    called = fam.say(calls=(ADD,))
    return [*called[:-1], *fam.encode(text), called[-1]]


SAID = {
    "text": Said(lambda fam: fam.say("It is 3.")),
    "characters": Said(lambda fam: fam.say(TEXT)),
    "nothing": Said(lambda fam: fam.say("x")[-1:]),
    "reasoning": Said(lambda fam: fam.say(TEXT, reasoning=f"Let me see.\n\n{TEXT}"), reasons=True),
    "reasoning alone": Said(lambda fam: fam.say("", reasoning="Hm."), reasons=True),
    "call": Said(lambda fam: fam.say(calls=(ADD,)), tools=True),
    "calls": Said(lambda fam: fam.say(calls=(ADD, Call("add", {}))[: fam.spec.calls]), tools=True),
    "all": Said(
        lambda fam: fam.say("I add.", reasoning="Hm.", calls=(ADD, ADD)[: fam.spec.calls]),
        tools=True,
        reasons=True,
    ),
    "broken call": Said(lambda fam: fam.say("So", calls=(Call("add", '{"a": 1, "b'),)), tools=True),
    "text after a call": Said(lambda fam: _then(fam, "And so on."), tools=True),
    "length": Said(lambda fam: fam.say("a long answer that is cut off"), cut=4),
    "length in a character": Said(lambda fam: fam.say("a 🙂🙂🙂"), cut=3),
    "length in reasoning": Said(
        lambda fam: fam.say(reasoning="Let me see what I can do."), cut=8, reasons=True
    ),
    "length in a call": Said(lambda fam: fam.say("So", calls=(ADD,)), cut=9, tools=True),
    "stop": Said(lambda fam: fam.say("one two STOP three"), stop="STOP"),
    "stop in a call": Said(lambda fam: fam.say(calls=(ADD,)), stop="city", tools=True),
}

UNSTOPPED = {name: said for name, said in SAID.items() if not said.stop}
"""Responses has no stop strings."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = FAMILIES if metafunc.config.getoption("--long") else FEW
    metafunc.parametrize("lab", cases, indirect=True, ids=label, scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Lab]:
    name, thinking = request.param
    fam = family(name, thinking=thinking)
    async with lab_of(fam, tmp_path_factory.mktemp(name), true=False) as lab:
        yield lab


def ids_for(lab: Lab, said: Said) -> list[int]:
    """What the engine says; skips what the family cannot say."""
    fam = lab.fam
    if (said.tools and not fam.spec.calls) or (said.reasons and not fam.reasons):
        pytest.skip("this family cannot say it")
    return said.ids(fam)


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
async def test_the_helper_of_messages_assembles_what_the_api_answers(lab: Lab, said: Said) -> None:
    ids = ids_for(lab, said)
    fields: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": ASK}],
        "max_tokens": len(ids) - said.cut,
    }
    if said.tools:
        function = TOOLS[0]["function"]
        fields["tools"] = [{"name": "add", "input_schema": function["parameters"]}]
    if said.stop:
        fields["stop_sequences"] = [said.stop]
    key = (await lab.open()).key
    client = AsyncAnthropic(base_url=lab.proxy.url, api_key=key, max_retries=0, timeout=LIMIT)
    async with client:
        lab.engine.say(ids)
        whole = await client.messages.create(**fields)
        lab.engine.say(ids)
        texts = ""
        async with client.messages.stream(**fields) as stream:
            async for event in stream:
                if event.type == "text":
                    texts += event.text
                elif event.type == "content_block_stop" and event.content_block.type == "text":
                    assert event.content_block.text == texts
                    texts = ""
            streamed = await stream.get_final_message()
    assert not texts
    assert plain(streamed) == plain(whole)
    if said.cut:
        assert whole.stop_reason == "max_tokens"
    elif said.stop and not said.tools:
        assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", said.stop)
    assert whole.usage.output_tokens <= len(ids) - said.cut


@pytest.mark.parametrize("said", UNSTOPPED.values(), ids=UNSTOPPED)
@pytest.mark.parametrize("logprobs", [False, True], ids=["", "logprobs"])
async def test_the_helper_of_responses_assembles_what_the_api_answers(
    lab: Lab, said: Said, logprobs: bool
) -> None:
    ids = ids_for(lab, said)
    fields: dict[str, Any] = {"model": "m", "input": ASK, "max_output_tokens": len(ids) - said.cut}
    if said.tools:
        fields["tools"] = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    if logprobs:
        fields["include"] = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    key = (await lab.open()).key
    client = AsyncOpenAI(base_url=f"{lab.proxy.url}/v1", api_key=key, max_retries=0, timeout=LIMIT)
    async with client:
        lab.engine.say(ids)
        whole = await client.responses.create(**fields)
        lab.engine.say(ids)
        snapshots: dict[int, str] = {}
        reasoning: dict[int, str] = {}
        async with client.responses.stream(**fields) as stream:
            async for event in stream:
                if event.type in (
                    "response.output_text.delta",
                    "response.function_call_arguments.delta",
                ):
                    snapshots[event.output_index] = event.snapshot
                elif event.type == "response.reasoning_text.delta":
                    at = event.output_index
                    reasoning[at] = reasoning.get(at, "") + event.delta
            if event.type == "response.completed":
                streamed = await stream.get_final_response()
            else:
                # The SDK gives a final object of complete ones alone.
                assert event.type == "response.incomplete"
                streamed = event.response
        again = [await client.responses.retrieve(answer.id) for answer in (whole, streamed)]
    assert plain(streamed) == plain(whole)
    assert [exactly(answer) for answer in again] == [exactly(whole), exactly(streamed)]
    for at, item in enumerate(streamed.output):
        if item.type == "message":
            (part,) = item.content
            assert part.text == snapshots.get(at, "")
            # A part without text has the token that ends it.
            if not logprobs or _located(lab.fam, said):
                assert bool(part.logprobs) == logprobs
        elif item.type == "function_call":
            assert item.arguments == snapshots.get(at, "")
        else:
            assert item.content is not None
            assert item.content[0].text == reasoning.get(at, "")
    assert (streamed.status == "incomplete") == bool(said.cut)
    assert streamed.usage is not None and streamed.usage.output_tokens <= len(ids) - said.cut


def _located(fam: Family, said: Said) -> bool:
    """Return whether single tokens delimit the answer's text, so that its tokens are known."""
    after_a_call = said is SAID["text after a call"]
    return not after_a_call and not (said.tools and fam.name in ("deepseek_r1", "gpt_oss"))


async def test_a_stream_that_breaks_is_no_answer(lab: Lab) -> None:
    """The engine fails in the middle: the helpers raise, and nothing is recorded."""
    said, talk = lab.fam.say("It is 3, I think."), await lab.open()
    openai_like = AsyncOpenAI(base_url=f"{lab.proxy.url}/v1", api_key=talk.key, max_retries=0)
    anthropic_like = AsyncAnthropic(base_url=lab.proxy.url, api_key=talk.key, max_retries=0)
    async with openai_like, anthropic_like:
        lab.engine.fail("nan", after=3)
        lab.engine.say(said)
        async with openai_like.responses.stream(model="m", input=ASK) as stream:
            *_, last = [event async for event in stream]
            assert last.type == "response.failed"
            assert last.response.error is not None and last.response.error.message
            # What it raises for want of a complete one.
            with fails_with(RuntimeError, "completed"):
                await stream.get_final_response()
        lab.engine.fail("nan", after=3)
        lab.engine.say(said)
        with pytest.raises(anthropic.APIStatusError):
            async with anthropic_like.messages.stream(
                model="m", max_tokens=len(said), messages=[{"role": "user", "content": ASK}]
            ) as events:
                await events.get_final_message()
    assert await lab.proxy.recorded(talk.id) == []


def exactly(answer: Any) -> Any:
    """As JSON, without what only the SDKs put there."""
    return _without(answer.to_dict(mode="json"), ("parsed", "parsed_arguments", "parsed_output"))


def plain(answer: Any) -> Any:
    """The same for any two answers that say the same: their ids and times are told apart."""
    body = exactly(answer)
    own = body["id"].rpartition("_")[2]
    text = json.dumps(_without(body, ("created_at", "completed_at"))).replace(own, "own")
    for number, id in enumerate(re.findall(r'"((?:call|toolu)_[0-9a-f]+)"', text)):
        text = text.replace(id, f"call {number}")
    return json.loads(text)


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {k: _without(v, names) for k, v in value.items() if k not in names}
    return [_without(v, names) for v in value] if isinstance(value, list) else value
