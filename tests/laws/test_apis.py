"""The laws over `/v1/responses` and `/v1/messages`, and over sessions that mix all of the APIs.

The short form tries some families, the long one all of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from any_agent.types import Continuation, Message
from tests.laws.test_laws import ASK, MORE, STREAM, after_opening, check_forced, thought
from tests.support.families import Call, family
from tests.support.laws.apis import APIS, CHAT, MESSAGES, NEW, RESPONSES, Api
from tests.support.laws.apis.responses import last_response
from tests.support.laws.cases import FAMILIES, label
from tests.support.laws.record import check_session
from tests.support.laws.service import CONTEXT, Lab, lab_of
from tests.support.laws.talk import TOOLS
from tests.support.proxy import until

FEW = [("qwen3", True), ("llama3", False), ("unknown_plain", False)]
SPOKEN = pytest.mark.parametrize("api", NEW, ids=lambda api: api.name)
pytestmark = pytest.mark.asyncio(loop_scope="module")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = FAMILIES if metafunc.config.getoption("--long") else FEW
    if "lab" in metafunc.fixturenames:
        calling = [case for case in cases if family(case[0]).spec.calls]
        fit = calling if metafunc.function in CALLING else cases
        metafunc.parametrize("lab", fit, indirect=True, ids=label, scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Lab]:
    name, thinking = request.param
    folder = tmp_path_factory.mktemp(name)
    async with lab_of(family(name, thinking=thinking), folder, context=CONTEXT) as lab:
        yield lab


@SPOKEN
@STREAM
async def test_turns(lab: Lab, api: Api, stream: bool) -> None:
    talk, messages = await lab.open(), list(ASK)
    for turn in range(3):
        said = lab.fam.say(f"It is {turn}, né? 🙂", **thought(lab))
        (answer,) = await talk.ask(messages, said, stream=stream, api=api)
        assert answer["content"] == f"It is {turn}, né? 🙂"
        assert answer.get("reasoning_content") == thought(lab).get("reasoning")
        messages += [answer, MORE]
    await talk.end()
    tree = await check_session(lab, talk)
    assert [n.continuation for n in tree] == [Continuation.ROOT, *[Continuation.EXACT] * 2]
    assert all(n.trainable and n.finish_reason == "stop" for n in tree)


@SPOKEN
@STREAM
async def test_tool_calls(lab: Lab, api: Api, stream: bool) -> None:
    count = min(2, lab.fam.spec.calls)
    talk, messages = await lab.open(), list(ASK)
    for turn in range(2):
        calls = tuple(Call("add", {"a": turn, "city": f"né {k}"}) for k in range(count))
        said = lab.fam.say(calls=calls, **thought(lab))
        (answer,) = await talk.ask(messages, said, stream=stream, api=api, tools=TOOLS)
        assert not answer.get("content")
        assert [c["function"]["name"] for c in answer["tool_calls"]] == ["add"] * count
        messages += [answer, *results(answer)]
    (answer,) = await talk.ask(messages, lab.fam.say("3."), stream=stream, api=api, tools=TOOLS)
    assert answer["content"] == "3."
    await talk.end()
    tree = await check_session(lab, talk)
    assert [n.continuation for n in tree] == [Continuation.ROOT, *[Continuation.EXACT] * 2]
    assert [n.finish_reason for n in tree] == [*["tool_calls"] * 2, "stop"]


FORCED: dict[str, dict[str, Any]] = {
    "responses": {"type": "function", "name": "add"},
    "messages": {"type": "tool", "name": "add"},
}
ANY: dict[str, Any] = {"responses": "required", "messages": {"type": "any"}}


@SPOKEN
@STREAM
async def test_forced_calls(lab: Lab, api: Api, stream: bool) -> None:
    """By name, and as any call of the only tool."""
    talk, messages = await lab.open(), list(ASK)
    sampled = []
    for turn, choice in enumerate((FORCED[api.name], ANY[api.name])):
        sampled.append(after_opening(lab.fam, Call("add", {"a": turn, "city": "né"}), "add"))
        (answer,) = await talk.ask(
            messages, sampled[-1], stream=stream, api=api, tools=TOOLS, tool_choice=choice
        )
        messages += [answer, *results(answer)]
    (answer,) = await talk.ask(messages, lab.fam.say("3."), stream=stream, api=api, tools=TOOLS)
    assert answer["content"] == "3."
    await talk.end()
    tree = await check_session(lab, talk)
    assert [n.continuation for n in tree] == [Continuation.ROOT, *[Continuation.EXACT] * 2]
    for node, said in zip(tree, sampled, strict=False):
        check_forced(lab, node, "add", said)


@STREAM
async def test_previous_answers_are_named(lab: Lab, stream: bool) -> None:
    """A chain, and a branch from its middle."""
    talk, messages = await lab.open(), list(ASK)
    before: list[Message] = []
    for turn in range(3):
        said = lab.fam.say(f"turn {turn}", **thought(lab))
        (answer,) = await talk.ask(messages, said, stream=stream, api=RESPONSES, previous=turn > 0)
        messages += [answer, MORE]
        # Another question, for of two answers to the same one the one that is left is not trained.
        before = before or [*messages[:-1], {"role": "user", "content": "Or else?"}]
    said = lab.fam.say("another way", **thought(lab))
    await talk.ask(before, said, stream=stream, api=RESPONSES, previous=True)
    await talk.end()
    first, second, third, branch = tree = await check_session(lab, talk)
    assert [n.continuation for n in tree] == [Continuation.ROOT, *[Continuation.EXACT] * 3]
    assert [n.parent_id for n in tree] == [None, first.id, second.id, first.id]
    assert third.trainable and branch.trainable


@SPOKEN
@STREAM
async def test_lengths_and_ends_at_once(lab: Lab, api: Api, stream: bool) -> None:
    talk, messages = await lab.open(), list(ASK)
    whole = lab.fam.say("a long answer that is cut off", **thought(lab))
    for length in (1, 5, len(whole) - 4):
        (answer,) = await talk.ask(messages, whole, stream=stream, api=api, max_tokens=length)
        messages += [answer, MORE]
    # An end at once: a token, and no text.
    (answer,) = await talk.ask(messages, lab.fam.say("x")[-1:], stream=stream, api=api)
    assert not answer.get("content")
    messages += [answer, MORE]
    await talk.ask(messages, lab.fam.say("done", **thought(lab)), stream=stream, api=api)
    await talk.end()
    nodes = list(await check_session(lab, talk))
    assert [n.finish_reason for n in nodes] == [*["length"] * 3, "stop", "stop"]
    assert [len(n.output_ids) for n in nodes[:4]] == [1, 5, len(whole) - 4, 1]
    assert all(n.trainable for n in nodes)
    assert all(n.continuation is Continuation.EXACT for n in nodes[1:])


@STREAM
async def test_stops(lab: Lab, stream: bool) -> None:
    talk, messages = await lab.open(), list(ASK)
    said = lab.fam.say("one two STOP three", **thought(lab))
    stops = ("STOP", "never")
    (answer,) = await talk.ask(messages, said, stream=stream, api=MESSAGES, stop=stops)
    assert answer["content"].strip() == "one two"
    assert (answer.whole["stop_reason"], answer.whole["stop_sequence"]) == ("stop_sequence", "STOP")
    messages += [answer, MORE]
    await talk.ask(messages, lab.fam.say("done"), stream=stream, api=MESSAGES)
    await talk.end()
    first, second = await check_session(lab, talk)
    text = lab.fam.chat.decode(first.output_ids.tolist())
    assert "STOP" in text and "three" not in text
    assert second.continuation is Continuation.EXACT and second.parent_id == first.id


@SPOKEN
@STREAM
async def test_who_leaves_and_who_comes_back(lab: Lab, api: Api, stream: bool) -> None:
    talk, messages = await lab.open(), list(ASK)
    (answer,) = await talk.ask(messages, lab.fam.say("first"), stream=stream, api=api)
    messages += [answer, MORE]
    # Its SDK marks no retries: the engine is freed at once.
    lab.engine.hold(2)
    unheard = lab.fam.say("nobody hears this")
    await talk.leave(messages, unheard, stream=stream, retry=None, api=api)
    await until(lambda: not lab.engine.running, "the engine is freed")
    # Marked: the retry joins the call in flight, and nothing is sampled twice.
    go_on = lab.engine.hold(2)
    said = lab.fam.say("heard in the end", **thought(lab))
    await talk.leave(messages, said, stream=stream, retry=0, api=api)
    sampled = len(lab.engine.requests)
    again = asyncio.create_task(talk.ask(messages, stream=stream, retry=1, api=api))
    await asyncio.sleep(0)
    go_on.set()
    (answer,) = await again
    assert len(lab.engine.requests) == sampled
    assert answer["content"] == "heard in the end"
    await talk.end()
    tree = await check_session(lab, talk)
    assert all(n.trainable == (n.id in talk.delivered) for n in tree)
    heard = [n.output_message["content"] for n in tree if n.trainable]
    assert heard == ["first", "heard in the end"]


@SPOKEN
@STREAM
async def test_versions(lab: Lab, api: Api, stream: bool) -> None:
    talk, messages = await lab.open(), list(ASK)
    said = lab.fam.say("one answer under two weights", **thought(lab))
    go_on = lab.engine.hold(4)
    asked = asyncio.create_task(talk.ask(messages, said, stream=stream, api=api))
    await until(lambda: any(len(r.ids) == 4 for r in lab.engine.running.values()))
    await lab.update()
    go_on.set()
    (answer,) = await asked
    assert answer["content"] == "one answer under two weights"
    messages += [answer, MORE]
    await talk.ask(messages, lab.fam.say("and the new ones"), stream=stream, api=api)
    await talk.end()
    first, second = await check_session(lab, talk)
    assert first.output_ids.tolist() == said
    new = max(lab.weights)
    assert first.output_versions.tolist() == [new - 1] * 4 + [new] * (len(said) - 4)
    assert set(second.output_versions.tolist()) == {new}
    assert second.parent_id == first.id


async def test_a_session_that_mixes_all_apis(lab: Lab) -> None:
    """Turn by turn another one, every order of two, streamed and not, with calls between."""
    talk, messages = await lab.open(), list(ASK)
    asks: dict[str, Any] = {"tools": TOOLS} if lab.fam.spec.calls else {}
    pairs = itertools.permutations((*APIS, None), 2)
    for turn, api in enumerate(itertools.chain.from_iterable(pairs)):
        # None: Responses again, but it names the last answer that it gave.
        previous = api is None and last_response(messages) is not None
        calls = (Call("add", {"a": turn, "b": [turn]}),) if asks and turn % 3 == 1 else ()
        said = lab.fam.say("" if calls else f"turn {turn}", calls=calls, **thought(lab))
        (answer,) = await talk.ask(
            messages, said, stream=turn % 2 == 0, api=api or RESPONSES, previous=previous, **asks
        )
        assert bool(answer.get("tool_calls")) == bool(calls)
        messages += [answer, *(results(answer) or [MORE])]
    await talk.end()
    tree = await check_session(lab, talk)
    assert len(tree) == turn + 1 and sum(not tree.children(n.id) for n in tree) == 1
    assert [n.continuation for n in tree] == [Continuation.ROOT, *[Continuation.EXACT] * turn]
    prefixes = {n.id.partition("_")[0].partition("-")[0] for n in tree}
    assert prefixes == {"chatcmpl", "resp", "msg"}


async def test_one_body_at_two_routes_is_two_calls(lab: Lab) -> None:
    """A marked retry takes up a call of its own route alone."""
    talk = await lab.open()
    await talk.ask(ASK, lab.fam.say("chat"), stream=False, retry=0, api=CHAT)
    for api in NEW:
        (answer,) = await talk.ask(ASK, lab.fam.say(api.name), stream=False, retry=1, api=api)
        assert answer["content"] == api.name
    await talk.end()
    assert len(await check_session(lab, talk)) == 3


def results(answer: Message) -> list[Message]:
    """What the tool answered."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        for call in answer.get("tool_calls") or []
    ]


CALLING = {test_tool_calls, test_forced_calls}
