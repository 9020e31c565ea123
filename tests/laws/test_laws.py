"""The laws for each family of chat formats and each API, over the real proxy: ids, continuation,
masks, log-probabilities and versions, streamed and not.

The engine says chosen tokens with the true log-probabilities of a seeded model. Chat completions
are tried on all families, the other APIs in the short form on some.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from any_agent.record import InteractionTree
from any_agent.types import Continuation, Interaction, Message
from tests.support.families import Call, Family, family
from tests.support.laws.apis import APIS, CHAT, MESSAGES, NEW, RESPONSES, Api, Given, results_of
from tests.support.laws.apis.responses import last_response
from tests.support.laws.cases import FAMILIES, label
from tests.support.laws.record import check_session
from tests.support.laws.service import CONTEXT, Lab, Talk, lab_of
from tests.support.laws.talk import TOOLS
from tests.support.proxy import until

FEW = {("qwen3", True), ("llama3", False), ("unknown_plain", False)}
ASK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2?"},
]
MORE: Message = {"role": "user", "content": "Go on."}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
pytestmark = pytest.mark.asyncio(loop_scope="module")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test for the families and APIs that it is about, family by family."""
    long, test = metafunc.config.getoption("--long"), metafunc.function
    pairs = [
        pytest.param(case, api, id=f"{label(case)}-{api.name}")
        for case in FAMILIES
        for api in ONLY.get(test, APIS)
        if (api is CHAT and test not in ON_FEW) or long or case in FEW
        if test not in CALLING or family(case[0]).spec.calls
    ]
    metafunc.parametrize(("lab", "api"), pairs, indirect=["lab"], scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Lab]:
    name, thinking = request.param
    folder = tmp_path_factory.mktemp(name)
    async with lab_of(family(name, thinking=thinking), folder, context=CONTEXT) as lab:
        yield lab


def thought(lab: Lab) -> dict[str, str]:
    return {"reasoning": "Let me see."} if lab.fam.reasons else {}


async def turn(talk: Talk, messages: list[Message], said: list[int], **how: Any) -> Given:
    """One more turn; what comes next is the tools' results, or a user who goes on."""
    (answer,) = await talk.ask(messages, said, **how)
    messages += [answer, *(results_of(answer) or [MORE])]
    return answer


async def ended(lab: Lab, talk: Talk) -> InteractionTree:
    """The record of a session that is over, for which every law holds."""
    await talk.end()
    return await check_session(lab, talk)


def require_one_chain(tree: InteractionTree) -> None:
    kinds = [Continuation.ROOT, *[Continuation.EXACT] * (len(tree) - 1)]
    assert [n.continuation for n in tree] == kinds


@STREAM
async def test_each_turn_continues_its_conversation_exactly(
    lab: Lab, api: Api, stream: bool
) -> None:
    talk, messages = await lab.open(), list(ASK)
    for number in range(3):
        said = lab.fam.say(f"It is {number}, né? 🙂", **thought(lab))
        answer = await turn(talk, messages, said, stream=stream, api=api)
        assert answer["content"] == f"It is {number}, né? 🙂"
        assert answer.get("reasoning_content") == thought(lab).get("reasoning")
    require_one_chain(tree := await ended(lab, talk))
    assert all(n.trainable and n.finish_reason == "stop" for n in tree)


@STREAM
async def test_tool_calls_and_their_results_continue_exactly(
    lab: Lab, api: Api, stream: bool
) -> None:
    count = min(2, lab.fam.spec.calls)
    talk, messages = await lab.open(), list(ASK)
    how: dict[str, Any] = {"stream": stream, "api": api, "tools": TOOLS}
    for number in range(2):
        calls = tuple(Call("add", {"a": number, "city": f"né {k}"}) for k in range(count))
        answer = await turn(talk, messages, lab.fam.say(calls=calls, **thought(lab)), **how)
        assert not answer.get("content")
        assert [c["function"]["name"] for c in answer["tool_calls"]] == ["add"] * count
    assert (await turn(talk, messages, lab.fam.say("3."), **how))["content"] == "3."
    require_one_chain(tree := await ended(lab, talk))
    assert [n.finish_reason for n in tree] == [*["tool_calls"] * 2, "stop"]


NAMED = {"type": "function", "function": {"name": "add"}}
TWO = [*TOOLS, {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
FORCED: dict[str, tuple[Any, Any]] = {
    "chat": (NAMED, "required"),
    "responses": ({"type": "function", "name": "add"}, "required"),
    "messages": ({"type": "tool", "name": "add"}, {"type": "any"}),
}
"""By API: how a call of one tool is asked for, and one of any."""


def after_opening(fam: Family, call: Call, name: str | None) -> list[int]:
    """Return what the model says where the call's opening was given."""
    assert fam.chat.grammar is not None and fam.chat.grammar.calls is not None
    opening, text = fam.chat.grammar.calls.open(name), fam.chat.decode(fam.say(calls=(call,)))
    if opening not in text:
        # Some models write no line break after the marker.
        opening = opening.replace("\n", "")
    return fam.encode(text[text.index(opening) + len(opening) :])


def check_forced(lab: Lab, node: Interaction, name: str | None, said: list[int]) -> None:
    """The opening stands at the prompt's end, and what was sampled is trained on."""
    forced = node.request["forced"]
    opening = lab.fam.chat.decode(node.prompt_delta_ids[-forced:].tolist())
    assert opening.endswith(lab.fam.chat.grammar.calls.open(name))  # type: ignore[union-attr]
    assert node.output_ids.tolist() == said
    assert node.trainable and node.finish_reason == "tool_calls"


@STREAM
@pytest.mark.parametrize("tools", [TOOLS, TWO], ids=["one tool", "two tools"])
async def test_forced_calls_are_opened_for_the_model_and_trained_on(
    lab: Lab, api: Api, stream: bool, tools: list[Any]
) -> None:
    """By name, and as any call, which of an only tool has its name."""
    talk, messages = await lab.open(), list(ASK)
    named, required = FORCED[api.name]
    asked = ((named, "add"), (required, "add" if tools is TOOLS else None))
    sampled = []
    how: dict[str, Any] = {"stream": stream, "api": api, "tools": tools}
    for number, (choice, name) in enumerate(asked):
        sampled.append(after_opening(lab.fam, Call("add", {"a": number, "city": "né"}), name))
        answer = await turn(talk, messages, sampled[-1], tool_choice=choice, **how)
        (call,) = answer["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": number, "city": "né"}
    assert (await turn(talk, messages, lab.fam.say("3."), **how))["content"] == "3."
    *nodes, last = tree = await ended(lab, talk)
    require_one_chain(tree)
    for node, (_, name), said in zip(nodes, asked, sampled, strict=True):
        check_forced(lab, node, name, said)
    assert "forced" not in last.request


@STREAM
@pytest.mark.parametrize("name", ["add", None], ids=["named", "required"])
async def test_a_forced_call_that_was_cut_off_is_closed_by_the_next_turn(
    lab: Lab, api: Api, stream: bool, name: str | None
) -> None:
    """The next turn closes what was cut off."""
    talk = await lab.open()
    tools, choice = (TOOLS, NAMED) if name else (TWO, "required")
    how: dict[str, Any] = {"stream": stream, "tools": tools, "tool_choice": choice}
    said = [after_opening(lab.fam, Call("add", {"a": k, "city": "né"}), name) for k in range(2)]
    (answer,) = await talk.ask(ASK, said[0][:2], max_tokens=2, **how)
    cut = [*ASK, answer, MORE]
    both = await talk.ask(cut, *said, n=2, **how)
    end = [*cut, both[1], *results_of(both[1])]
    await talk.ask(end, lab.fam.say("3."), stream=stream, tools=tools)
    first, *choices, last = await ended(lab, talk)
    assert first.trainable and first.finish_reason == "length"
    for node in choices:
        check_forced(lab, node, name, node.output_ids.tolist())
    assert sorted(n.output_ids.tolist() for n in choices) == sorted(said)
    assert last.parent_id == choices[1].id
    if first.output_message.get("tool_calls") or first.output_message["content"]:
        assert {n.parent_id for n in choices} == {first.id}


@STREAM
async def test_a_forced_call_under_two_weights_has_the_right_version_at_each_token(
    lab: Lab, api: Api, stream: bool
) -> None:
    talk = await lab.open()
    said = after_opening(lab.fam, Call("add", {"a": 1, "city": "né"}), "add")
    go_on = lab.engine.hold(2)
    asked = asyncio.create_task(talk.ask(ASK, said, stream=stream, tools=TOOLS, tool_choice=NAMED))
    await until(lambda: any(len(r.ids) == 2 for r in lab.engine.running.values()))
    await lab.update()
    go_on.set()
    await asked
    (node,) = await ended(lab, talk)
    check_forced(lab, node, "add", said)
    new = max(lab.weights)
    assert node.output_versions.tolist() == [new - 1] * 2 + [new] * (len(said) - 2)


@STREAM
async def test_answers_that_are_cut_off_or_end_at_once_are_continued(
    lab: Lab, api: Api, stream: bool
) -> None:
    talk, messages = await lab.open(), list(ASK)
    whole = lab.fam.say("a long answer that is cut off", **thought(lab))
    for length in (1, 5, len(whole) - 4):
        await turn(talk, messages, whole, stream=stream, api=api, max_tokens=length)
    # An end at once: a token, and no text.
    answer = await turn(talk, messages, lab.fam.say("x")[-1:], stream=stream, api=api)
    assert not answer.get("content")
    await turn(talk, messages, lab.fam.say("done", **thought(lab)), stream=stream, api=api)
    require_one_chain(tree := await ended(lab, talk))
    nodes = list(tree)
    assert [n.finish_reason for n in nodes] == [*["length"] * 3, "stop", "stop"]
    assert [len(n.output_ids) for n in nodes[:4]] == [1, 5, len(whole) - 4, 1]
    assert all(n.trainable for n in nodes)


@STREAM
async def test_nothing_follows_the_token_that_completed_a_stop_string(
    lab: Lab, api: Api, stream: bool
) -> None:
    talk, messages = await lab.open(), list(ASK)
    said = lab.fam.say("one two STOP three", **thought(lab))
    answer = await turn(talk, messages, said, stream=stream, api=api, stop=("STOP", "never"))
    assert answer["content"].strip() == "one two"
    if api is MESSAGES:
        told = answer.whole["stop_reason"], answer.whole["stop_sequence"]
        assert told == ("stop_sequence", "STOP")
    await turn(talk, messages, lab.fam.say("done"), stream=stream, api=api)
    first, second = await ended(lab, talk)
    text = lab.fam.chat.decode(first.output_ids.tolist())
    assert "STOP" in text and "three" not in text and first.finish_reason == "stop"
    assert second.continuation is Continuation.EXACT and second.parent_id == first.id


@STREAM
async def test_a_talk_goes_on_from_any_of_several_choices(lab: Lab, api: Api, stream: bool) -> None:
    talk = await lab.open()
    outputs = [lab.fam.say(f"choice {k}", **thought(lab)) for k in range(2)]
    answers = await talk.ask(ASK, *outputs, stream=stream, n=2)
    assert {a["content"] for a in answers} == {"choice 0", "choice 1"}
    messages = [*ASK, answers[1], MORE]
    await talk.ask(messages, lab.fam.say("and so on", **thought(lab)), stream=stream)
    first, second, child = await ended(lab, talk)
    assert (first.parent_id, second.parent_id, child.parent_id) == (None, None, second.id)
    assert second.output_message["content"] == answers[1]["content"]


@STREAM
async def test_who_leaves_frees_the_engine_and_a_marked_retry_is_sampled_once(
    lab: Lab, api: Api, stream: bool
) -> None:
    talk, messages = await lab.open(), list(ASK)
    await turn(talk, messages, lab.fam.say("first"), stream=stream, api=api)
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
    tree = await ended(lab, talk)
    assert all(n.trainable == (n.id in talk.delivered) for n in tree)
    heard = [n.output_message["content"] for n in tree if n.trainable]
    assert heard == ["first", "heard in the end"]


@STREAM
async def test_each_token_has_the_version_that_sampled_it(lab: Lab, api: Api, stream: bool) -> None:
    talk, messages = await lab.open(), list(ASK)
    said = lab.fam.say("one answer under two weights", **thought(lab))
    go_on = lab.engine.hold(4)
    asked = asyncio.create_task(turn(talk, messages, said, stream=stream, api=api))
    await until(lambda: any(len(r.ids) == 4 for r in lab.engine.running.values()))
    await lab.update()
    go_on.set()
    assert (await asked)["content"] == "one answer under two weights"
    await turn(talk, messages, lab.fam.say("and the new ones"), stream=stream, api=api)
    first, second = await ended(lab, talk)
    assert first.output_ids.tolist() == said
    new = max(lab.weights)
    assert first.output_versions.tolist() == [new - 1] * 4 + [new] * (len(said) - 4)
    assert set(second.output_versions.tolist()) == {new}
    assert second.parent_id == first.id


@STREAM
async def test_a_talk_goes_on_from_answers_that_are_given_by_name(
    lab: Lab, api: Api, stream: bool
) -> None:
    """A chain, and a branch from its middle."""
    talk, messages = await lab.open(), list(ASK)
    before: list[Message] = []
    for number in range(3):
        said = lab.fam.say(f"turn {number}", **thought(lab))
        await turn(talk, messages, said, stream=stream, api=api, previous=number > 0)
        # Another question, for of two answers to the same one the one that is left is not trained.
        before = before or [*messages[:-1], {"role": "user", "content": "Or else?"}]
    said = lab.fam.say("another way", **thought(lab))
    await talk.ask(before, said, stream=stream, api=api, previous=True)
    first, second, third, branch = tree = await ended(lab, talk)
    require_one_chain(tree)
    assert [n.parent_id for n in tree] == [None, first.id, second.id, first.id]
    assert third.trainable and branch.trainable


async def test_a_session_that_mixes_all_apis_is_one_chain(lab: Lab, api: Api) -> None:
    """Turn by turn another one, every order of two, streamed and not, with calls between."""
    talk, messages = await lab.open(), list(ASK)
    asks: dict[str, Any] = {"tools": TOOLS} if lab.fam.spec.calls else {}
    pairs = itertools.permutations((*APIS, None), 2)
    for number, spoken in enumerate(itertools.chain.from_iterable(pairs)):
        # None: Responses again, but it names the last answer that it gave.
        previous = spoken is None and last_response(messages) is not None
        calls = (Call("add", {"a": number, "b": [number]}),) if asks and number % 3 == 1 else ()
        said = lab.fam.say("" if calls else f"turn {number}", calls=calls, **thought(lab))
        how = {"stream": number % 2 == 0, "api": spoken or RESPONSES, "previous": previous}
        answer = await turn(talk, messages, said, **how, **asks)
        assert bool(answer.get("tool_calls")) == bool(calls)
    require_one_chain(tree := await ended(lab, talk))
    assert len(tree) == number + 1 and sum(not tree.children(n.id) for n in tree) == 1
    prefixes = {n.id.partition("_")[0].partition("-")[0] for n in tree}
    assert prefixes == {"chatcmpl", "resp", "msg"}


async def test_one_body_at_two_routes_is_two_calls(lab: Lab, api: Api) -> None:
    """A marked retry takes up a call of its own route alone."""
    talk = await lab.open()
    await talk.ask(ASK, lab.fam.say("chat"), stream=False, retry=0)
    for other in NEW:
        (answer,) = await talk.ask(ASK, lab.fam.say(other.name), stream=False, retry=1, api=other)
        assert answer["content"] == other.name
    assert len(await ended(lab, talk)) == 3


CALLING = {
    test_tool_calls_and_their_results_continue_exactly,
    test_forced_calls_are_opened_for_the_model_and_trained_on,
    test_a_forced_call_that_was_cut_off_is_closed_by_the_next_turn,
    test_a_forced_call_under_two_weights_has_the_right_version_at_each_token,
}
ON_FEW = {test_a_session_that_mixes_all_apis_is_one_chain, test_one_body_at_two_routes_is_two_calls}
ONLY: dict[Any, tuple[Api, ...]] = {
    test_a_forced_call_that_was_cut_off_is_closed_by_the_next_turn: (CHAT,),
    test_a_forced_call_under_two_weights_has_the_right_version_at_each_token: (CHAT,),
    test_nothing_follows_the_token_that_completed_a_stop_string: (CHAT, MESSAGES),
    test_a_talk_goes_on_from_any_of_several_choices: (CHAT,),
    test_a_talk_goes_on_from_answers_that_are_given_by_name: (RESPONSES,),
    **dict.fromkeys(ON_FEW, (CHAT,)),
}
"""The APIs of tests that are not about all."""
