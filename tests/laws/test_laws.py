"""The laws for each family of chat formats, over the real proxy: ids, continuation, masks,
log-probabilities and versions, streamed and not.

The engine says chosen tokens with the true log-probabilities of a seeded model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from any_agent.types import Continuation, Interaction, Message
from tests.support.families import Call, Family, family
from tests.support.laws.cases import FAMILIES, label
from tests.support.laws.record import check_session
from tests.support.laws.service import CONTEXT, Lab, lab_of
from tests.support.laws.talk import TOOLS
from tests.support.proxy import until

ASK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2?"},
]
MORE: Message = {"role": "user", "content": "Go on."}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CALLING = pytest.mark.parametrize(
    "lab", [c for c in FAMILIES if family(c[0]).spec.calls], indirect=True, ids=label
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES, ids=label)
async def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Lab]:
    name, thinking = request.param
    folder = tmp_path_factory.mktemp(name)
    async with lab_of(family(name, thinking=thinking), folder, context=CONTEXT) as lab:
        yield lab


def thought(lab: Lab) -> dict[str, str]:
    return {"reasoning": "Let me see."} if lab.fam.reasons else {}


@STREAM
async def test_turns(lab: Lab, stream: bool) -> None:
    talk, messages = await lab.open(), list(ASK)
    for turn in range(4):
        said = lab.fam.say(f"It is {turn}, né? 🙂", **thought(lab))
        (answer,) = await talk.ask(messages, said, stream=stream)
        assert answer["content"] == f"It is {turn}, né? 🙂"
        assert answer.get("reasoning_content") == thought(lab).get("reasoning")
        messages += [answer, MORE]
    await talk.end()
    tree = await check_session(lab, talk)
    assert [n.continuation for n in tree] == [Continuation.ROOT, *[Continuation.EXACT] * 3]
    assert all(n.trainable and n.finish_reason == "stop" for n in tree)


@CALLING
@STREAM
async def test_tool_calls(lab: Lab, stream: bool) -> None:
    count = min(2, lab.fam.spec.calls)
    talk, messages = await lab.open(), list(ASK)
    for turn in range(3):
        calls = tuple(Call("add", {"a": turn, "city": f"né {k}"}) for k in range(count))
        said = lab.fam.say(calls=calls, **thought(lab))
        (answer,) = await talk.ask(messages, said, stream=stream, tools=TOOLS)
        assert not answer.get("content")
        assert [c["function"]["name"] for c in answer["tool_calls"]] == ["add"] * count
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": "3"} for c in answer["tool_calls"]
        ]
        messages += [answer, *results]
    (answer,) = await talk.ask(messages, lab.fam.say("3."), stream=stream, tools=TOOLS)
    assert answer["content"] == "3."
    await talk.end()
    tree = await check_session(lab, talk)
    assert [n.continuation for n in tree] == [Continuation.ROOT, *[Continuation.EXACT] * 3]
    assert [n.finish_reason for n in tree] == [*["tool_calls"] * 3, "stop"]


NAMED = {"type": "function", "function": {"name": "add"}}
TWO = [*TOOLS, {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


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


@CALLING
@STREAM
@pytest.mark.parametrize("name", ["add", None], ids=["named", "required"])
async def test_forced_calls(lab: Lab, stream: bool, name: str | None) -> None:
    talk, messages = await lab.open(), list(ASK)
    tools, choice = (TOOLS, NAMED) if name else (TWO, "required")
    sampled = []
    for turn in range(2):
        sampled.append(after_opening(lab.fam, Call("add", {"a": turn, "city": "né"}), name))
        (answer,) = await talk.ask(
            messages, sampled[-1], stream=stream, tools=tools, tool_choice=choice
        )
        (call,) = answer["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": turn, "city": "né"}
        messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    # Cut off within the call, which the next turn closes; then several choices of one call.
    (answer,) = await talk.ask(
        messages, sampled[0][:2], stream=stream, tools=tools, tool_choice=choice, max_tokens=2
    )
    cut = [*messages, answer, MORE]
    both = await talk.ask(cut, *sampled, stream=stream, tools=tools, tool_choice=choice, n=2)
    (call,) = both[1]["tool_calls"]
    end = [*cut, both[1], {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    await talk.ask(end, lab.fam.say("3."), stream=stream, tools=tools)
    await talk.end()
    first, second, third, *choices, last = await check_session(lab, talk)
    check_forced(lab, first, name, sampled[0])
    check_forced(lab, second, name, sampled[1])
    assert third.trainable and third.finish_reason == "length"
    for node in choices:
        check_forced(lab, node, name, node.output_ids.tolist())
    assert sorted(n.output_ids.tolist() for n in choices) == sorted(sampled)
    assert "forced" not in last.request
    assert [n.parent_id for n in (second, third, last)] == [first.id, second.id, choices[1].id]
    if third.output_message.get("tool_calls") or third.output_message["content"]:
        assert {n.parent_id for n in choices} == {third.id}


@CALLING
@STREAM
async def test_a_forced_call_under_two_weights(lab: Lab, stream: bool) -> None:
    talk = await lab.open()
    said = after_opening(lab.fam, Call("add", {"a": 1, "city": "né"}), "add")
    go_on = lab.engine.hold(2)
    asked = asyncio.create_task(talk.ask(ASK, said, stream=stream, tools=TOOLS, tool_choice=NAMED))
    await until(lambda: any(len(r.ids) == 2 for r in lab.engine.running.values()))
    await lab.update()
    go_on.set()
    await asked
    await talk.end()
    (node,) = await check_session(lab, talk)
    check_forced(lab, node, "add", said)
    new = max(lab.weights)
    assert node.output_versions.tolist() == [new - 1] * 2 + [new] * (len(said) - 2)


@STREAM
async def test_stops_and_lengths(lab: Lab, stream: bool) -> None:
    talk, messages = await lab.open(), list(ASK)
    said = lab.fam.say("one two STOP three", **thought(lab))
    (answer,) = await talk.ask(messages, said, stream=stream, stop=["STOP", "never"])
    assert answer["content"].strip() == "one two"
    messages += [answer, MORE]
    whole = lab.fam.say("a long answer that is cut off", **thought(lab))
    for length in (1, 5, len(whole) - 4):
        (answer,) = await talk.ask(messages, whole, stream=stream, max_tokens=length)
        messages += [answer, MORE]
    # An end at once: a token, and no text.
    (answer,) = await talk.ask(messages, lab.fam.say("x")[-1:], stream=stream)
    assert not answer.get("content")
    messages += [answer, MORE]
    await talk.ask(messages, lab.fam.say("done", **thought(lab)), stream=stream)
    await talk.end()
    tree = await check_session(lab, talk)
    nodes = list(tree)
    assert [n.finish_reason for n in nodes] == ["stop", *["length"] * 3, "stop", "stop"]
    assert all(n.trainable for n in nodes)
    # Nothing follows the token that completed the stop string.
    text = lab.fam.chat.decode(nodes[0].output_ids.tolist())
    assert "STOP" in text and "three" not in text
    assert [len(n.output_ids) for n in nodes[1:5]] == [1, 5, len(whole) - 4, 1]
    assert all(n.continuation is Continuation.EXACT for n in nodes[1:])


@STREAM
async def test_choices(lab: Lab, stream: bool) -> None:
    talk = await lab.open()
    outputs = [lab.fam.say(f"choice {k}", **thought(lab)) for k in range(2)]
    answers = await talk.ask(ASK, *outputs, stream=stream, n=2)
    assert {a["content"] for a in answers} == {"choice 0", "choice 1"}
    messages = [*ASK, answers[1], MORE]
    await talk.ask(messages, lab.fam.say("and so on", **thought(lab)), stream=stream)
    await talk.end()
    tree = await check_session(lab, talk)
    first, second, child = tree
    assert (first.parent_id, second.parent_id, child.parent_id) == (None, None, second.id)
    assert second.output_message["content"] == answers[1]["content"]


@STREAM
async def test_who_leaves_and_who_comes_back(lab: Lab, stream: bool) -> None:
    talk, messages = await lab.open(), list(ASK)
    (answer,) = await talk.ask(messages, lab.fam.say("first"), stream=stream)
    messages += [answer, MORE]
    # Its SDK marks no retries: the engine is freed at once.
    lab.engine.hold(2)
    await talk.leave(messages, lab.fam.say("nobody hears this"), stream=stream, retry=None)
    await until(lambda: not lab.engine.running, "the engine is freed")
    # Marked: the retry joins the call in flight, and nothing is sampled twice.
    go_on = lab.engine.hold(2)
    said = lab.fam.say("heard in the end", **thought(lab))
    await talk.leave(messages, said, stream=stream, retry=0)
    sampled = len(lab.engine.requests)
    again = asyncio.create_task(talk.ask(messages, stream=stream, retry=1))
    await asyncio.sleep(0)
    go_on.set()
    (answer,) = await again
    assert len(lab.engine.requests) == sampled
    assert answer["content"] == "heard in the end"
    await talk.end()
    tree = await check_session(lab, talk)
    assert all(n.trainable == (n.id in talk.delivered) for n in tree)
    assert [n.output_message["content"] for n in tree if n.trainable] == [
        "first",
        "heard in the end",
    ]


@STREAM
async def test_versions(lab: Lab, stream: bool) -> None:
    talk, messages = await lab.open(), list(ASK)
    said = lab.fam.say("one answer under two weights", **thought(lab))
    go_on = lab.engine.hold(4)
    asked = asyncio.create_task(talk.ask(messages, said, stream=stream))
    await until(lambda: any(len(r.ids) == 4 for r in lab.engine.running.values()))
    await lab.update()
    go_on.set()
    (answer,) = await asked
    assert answer["content"] == "one answer under two weights"
    messages += [answer, MORE]
    await talk.ask(messages, lab.fam.say("and the new ones"), stream=stream)
    await talk.end()
    tree = await check_session(lab, talk)
    first, second = tree
    assert first.output_ids.tolist() == said
    new = max(lab.weights)
    assert first.output_versions.tolist() == [new - 1] * 4 + [new] * (len(said) - 4)
    assert set(second.output_versions.tolist()) == {new}
    assert second.parent_id == first.id
