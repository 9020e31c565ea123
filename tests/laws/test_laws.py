"""The laws for each family of chat formats, over the real proxy: ids, continuation, masks,
log-probabilities and versions, streamed and not.

The engine says chosen tokens with the true log-probabilities of a seeded model.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from any_agent.types import Continuation, Message
from tests.families import Call, family
from tests.laws.record import check_session
from tests.laws.service import Lab, lab_of
from tests.laws.talk import TOOLS
from tests.laws.test_conversations import FAMILIES
from tests.proxy_ext.proxy_lab import until

ASK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 2?"},
]
MORE: Message = {"role": "user", "content": "Go on."}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
EACH = pytest.mark.parametrize(("name", "thinking"), FAMILIES)
CALLING = pytest.mark.parametrize(
    ("name", "thinking"), [case for case in FAMILIES if family(case[0]).spec.calls]
)


def thought(lab: Lab) -> dict[str, str]:
    return {"reasoning": "Let me see."} if lab.fam.reasons else {}


@EACH
@STREAM
async def test_turns(tmp_path: Path, name: str, thinking: bool, stream: bool) -> None:
    fam = family(name, thinking=thinking)
    async with lab_of(fam, tmp_path) as lab:
        talk, messages = await lab.open(), list(ASK)
        for turn in range(4):
            said = fam.say(f"It is {turn}, né? 🙂", **thought(lab))
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
async def test_tool_calls(tmp_path: Path, name: str, thinking: bool, stream: bool) -> None:
    fam = family(name, thinking=thinking)
    count = min(2, fam.spec.calls)
    async with lab_of(fam, tmp_path) as lab:
        talk, messages = await lab.open(), list(ASK)
        for turn in range(3):
            calls = tuple(Call("add", {"a": turn, "city": f"né {k}"}) for k in range(count))
            said = fam.say(calls=calls, **thought(lab))
            (answer,) = await talk.ask(messages, said, stream=stream, tools=TOOLS)
            assert not answer.get("content")
            assert [c["function"]["name"] for c in answer["tool_calls"]] == ["add"] * count
            results = [
                {"role": "tool", "tool_call_id": c["id"], "content": "3"}
                for c in answer["tool_calls"]
            ]
            messages += [answer, *results]
        (answer,) = await talk.ask(messages, fam.say("3."), stream=stream, tools=TOOLS)
        assert answer["content"] == "3."
        await talk.end()
        tree = await check_session(lab, talk)
    assert [n.continuation for n in tree] == [Continuation.ROOT, *[Continuation.EXACT] * 3]
    assert [n.finish_reason for n in tree] == [*["tool_calls"] * 3, "stop"]


@EACH
@STREAM
async def test_stops_and_lengths(tmp_path: Path, name: str, thinking: bool, stream: bool) -> None:
    fam = family(name, thinking=thinking)
    async with lab_of(fam, tmp_path) as lab:
        talk, messages = await lab.open(), list(ASK)
        said = fam.say("one two STOP three", **thought(lab))
        (answer,) = await talk.ask(messages, said, stream=stream, stop=["STOP", "never"])
        assert answer["content"].strip() == "one two"
        messages += [answer, MORE]
        whole = fam.say("a long answer that is cut off", **thought(lab))
        for length in (1, 5, len(whole) - 4):
            (answer,) = await talk.ask(messages, whole, stream=stream, max_tokens=length)
            messages += [answer, MORE]
        # An end at once: a token, and no text.
        (answer,) = await talk.ask(messages, fam.say("x")[-1:], stream=stream)
        assert not answer.get("content")
        messages += [answer, MORE]
        await talk.ask(messages, fam.say("done", **thought(lab)), stream=stream)
        await talk.end()
        tree = await check_session(lab, talk)
    nodes = list(tree)
    assert [n.finish_reason for n in nodes] == ["stop", *["length"] * 3, "stop", "stop"]
    assert all(n.trainable for n in nodes)
    # Nothing follows the token that completed the stop string.
    text = fam.chat.decode(nodes[0].output_ids.tolist())
    assert "STOP" in text and "three" not in text
    assert [len(n.output_ids) for n in nodes[1:5]] == [1, 5, len(whole) - 4, 1]
    assert all(n.continuation is Continuation.EXACT for n in nodes[1:])


@EACH
@STREAM
async def test_choices(tmp_path: Path, name: str, thinking: bool, stream: bool) -> None:
    fam = family(name, thinking=thinking)
    async with lab_of(fam, tmp_path) as lab:
        talk = await lab.open()
        outputs = [fam.say(f"choice {k}", **thought(lab)) for k in range(2)]
        answers = await talk.ask(ASK, *outputs, stream=stream, n=2)
        assert {a["content"] for a in answers} == {"choice 0", "choice 1"}
        messages = [*ASK, answers[1], MORE]
        await talk.ask(messages, fam.say("and so on", **thought(lab)), stream=stream)
        await talk.end()
        tree = await check_session(lab, talk)
    first, second, child = tree
    assert (first.parent_id, second.parent_id, child.parent_id) == (None, None, second.id)
    assert second.output_message["content"] == answers[1]["content"]


@EACH
@STREAM
async def test_who_leaves_and_who_comes_back(
    tmp_path: Path, name: str, thinking: bool, stream: bool
) -> None:
    fam = family(name, thinking=thinking)
    async with lab_of(fam, tmp_path) as lab:
        talk, messages = await lab.open(), list(ASK)
        (answer,) = await talk.ask(messages, fam.say("first"), stream=stream)
        messages += [answer, MORE]
        # Its SDK marks no retries: the engine is freed at once.
        lab.engine.hold(2)
        await talk.leave(messages, fam.say("nobody hears this"), stream=stream, retry=None)
        await until(lambda: not lab.engine.running, "the engine is freed")
        # Marked: the retry joins the call in flight, and nothing is sampled twice.
        go_on = lab.engine.hold(2)
        said = fam.say("heard in the end", **thought(lab))
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


@EACH
@STREAM
async def test_versions(tmp_path: Path, name: str, thinking: bool, stream: bool) -> None:
    fam = family(name, thinking=thinking)
    async with lab_of(fam, tmp_path) as lab:
        talk, messages = await lab.open(), list(ASK)
        said = fam.say("one answer under two weights", **thought(lab))
        go_on = lab.engine.hold(4)
        asked = asyncio.create_task(talk.ask(messages, said, stream=stream))
        await until(lambda: any(len(r.ids) == 4 for r in lab.engine.running.values()))
        await lab.update()
        go_on.set()
        (answer,) = await asked
        assert answer["content"] == "one answer under two weights"
        messages += [answer, MORE]
        await talk.ask(messages, fam.say("and the new ones"), stream=stream)
        await talk.end()
        tree = await check_session(lab, talk)
    first, second = tree
    assert first.output_ids.tolist() == said
    assert first.output_versions.tolist() == [0] * 4 + [1] * (len(said) - 4)
    assert set(second.output_versions.tolist()) == {1}
    assert second.parent_id == first.id


@EACH
async def test_two_hundred_turns(tmp_path: Path, name: str, thinking: bool) -> None:
    fam = family(name, thinking=thinking)
    fields: dict[str, Any] = {"tools": TOOLS} if fam.spec.calls else {}
    async with lab_of(fam, tmp_path, true=False, context=1 << 16) as lab:
        talk, messages = await lab.open(), list(ASK)
        for turn in range(200):
            calls = (Call("add", {"a": turn}),) if fam.spec.calls and turn % 3 == 1 else ()
            said = fam.say("" if calls else f"turn {turn}", calls=calls)
            (answer,) = await talk.ask(messages, said, stream=turn % 2 == 0, **fields)
            results = [
                {"role": "tool", "tool_call_id": c["id"], "content": str(turn)}
                for c in answer.get("tool_calls") or []
            ]
            messages += [answer, *(results or [MORE])]
        await talk.end()
        tree = await check_session(lab, talk)
    assert len(tree) == 200 and len(tree.leaves()) == 1
    assert sum(n.continuation is Continuation.EXACT for n in tree) == 199
