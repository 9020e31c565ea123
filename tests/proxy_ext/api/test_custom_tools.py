"""Custom tools, whose input is free text: called, sent back and continued exactly."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from any_agent.chat import ChatFormat
from tests.proxy_ext.api.test_chat import say
from tests.proxy_ext.api.test_responses import exact
from tests.support.openai_agent import TOOLS, create, post, refused, said_back
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Restart
from tests.support.scripted_engine import ScriptedEngine

BOTH = pytest.mark.parametrize("stream", [False, True])
GRAMMAR = {"syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", **GRAMMAR}}
INPUT = '*** Begin Patch\n+ "né" \\\n*** End Patch'
ODD = '{"input": "a", "more": 1}'


def call_of(arguments: str, name: str = "patch") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SAID = orjson.dumps({"input": INPUT}).decode().replace("né", "n\\u00e9").replace(":", " :  ")


@BOTH
async def test_calls_of_custom_tools_go_on_exactly_in_responses(
    restart: Restart, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    proxy = await restart()
    session = await proxy.open()
    key = session["api_key"]
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "tools": [*TOOLS, PATCH, {"type": "namespace", "name": "files", "tools": [PATCH]}],
        "stream": stream,
    }
    # What is no input alone, the agent gets as the model wrote it.
    ids = say(engine, chat, f"Hm.\n{call_of(SAID)}\n{call_of(ODD, 'files__patch')}")
    first: Any = await create(proxy, key, **asked)
    _, one, two = first.output
    assert one.type == two.type == "custom_tool_call"
    assert (one.name, one.namespace, one.input) == ("patch", None, INPUT)
    assert (two.name, two.namespace, two.input) == ("patch", "files", ODD)
    assert one.id is not None and one.id.startswith("ctc_")
    proxy = await restart()
    proxy.http.headers["authorization"] = f"Bearer {key}"
    told = (await proxy.http.get(f"/v1/responses/{first.id}")).json()
    assert told["output"] == said_back(first)
    assert [tool["type"] for tool in told["tools"]] == ["function", "custom", "namespace"]
    assert told["tools"][1] == {**PATCH, "description": None}

    outputs = [
        {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
        for call in (one, two)
    ]
    say(engine, chat, call_of("3"))
    second: Any = await create(proxy, key, input=[*HELLO, *said_back(first), *outputs], **asked)
    (three,) = second.output
    assert (three.type, three.input) == ("custom_tool_call", "3")
    before = ids_of(engine, -2) + ids
    assert ids_of(engine, -1)[: len(before)] == before
    listed = (await proxy.http.get(f"/v1/responses/{second.id}/input_items?order=asc")).json()
    kinds = [item["type"] for item in listed["data"]]
    assert kinds[2:] == ["custom_tool_call"] * 2 + ["custom_tool_call_output"] * 2
    assert [item["input"] for item in listed["data"][2:4]] == [INPUT, ODD]

    say(engine, chat, "Well.")
    output = {"type": "custom_tool_call_output", "call_id": three.call_id, "output": "No."}
    third = await create(proxy, key, input=[output], previous_response_id=second.id, **asked)
    say(engine, chat, "Bye.")
    references = [{"type": "item_reference", "id": item["id"]} for item in said_back(first)]
    answered = [{"type": "item_reference", "id": three.id}, output]
    talk = [*HELLO, *references, *outputs, *answered, *said_back(third), *HELLO]
    await create(proxy, key, input=talk, **asked)
    recorded = await exact(proxy, session["session_id"])
    assert len(recorded) == 4 and all(i.trainable for i in recorded)
    assert recorded[0].output_ids.tolist() == ids
    assert recorded[0].output_message["tool_calls"][0]["function"]["arguments"] == SAID


def ids_of(engine: ScriptedEngine, k: int) -> list[int]:
    return list(engine.requests[k]["input_ids"])


@BOTH
async def test_calls_of_custom_tools_go_on_exactly_in_chats(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, stream: bool
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    custom = {"name": "patch", "format": {"type": "grammar", "grammar": GRAMMAR}}
    tools: list[Any] = [{"type": "custom", "custom": custom}]
    ids = say(engine, chat, f"{call_of(SAID)}\n{call_of(ODD)}")
    asked: dict[str, Any] = {"tools": tools, "max_tokens": 300}
    if stream:
        events, _ = await proxy.stream(key, **asked)
        calls = merged([event["choices"][0]["delta"] for event in events])
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = (await proxy.complete(key, **asked))["choices"]
        calls, reason = choice["message"]["tool_calls"], choice["finish_reason"]
    assert reason == "tool_calls"
    assert [(call["type"], call["custom"]) for call in calls] == [
        ("custom", {"name": "patch", "input": INPUT}),
        ("custom", {"name": "patch", "input": ODD}),
    ]
    talk: list[Any] = [*HELLO, {"role": "assistant", "tool_calls": calls}]
    talk += [{"role": "tool", "tool_call_id": c["id"], "content": "Done."} for c in calls]
    say(engine, chat, "Well.")
    await proxy.complete(key, talk, **asked)
    before = ids_of(engine, -2) + ids
    assert ids_of(engine, -1)[: len(before)] == before
    # Another API's conversation is the same.
    say(engine, chat, "Bye.")
    more = [{"role": "user", "content": "Sure?"}]
    (_, last) = await exact(proxy, session["session_id"])
    await create(proxy, key, previous_response_id=last.id, input=more, tools=[PATCH])
    recorded = await exact(proxy, session["session_id"])
    assert len(recorded) == 3 and recorded[0].finish_reason == "tool_calls"


def merged(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a stream, as an agent puts them together."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for step in delta.get("tool_calls") or ():
            call = calls.setdefault(step["index"], {"custom": {"name": "", "input": ""}})
            call |= {name: step[name] for name in ("id", "type") if name in step}
            for name, text in step["custom"].items():
                call["custom"][name] += text
    return [calls[k] for k in sorted(calls)]


async def test_a_wrong_call_of_a_custom_tool_is_named(proxy: Proxy) -> None:
    key = (await proxy.open())["api_key"]
    call = {"id": "c", "type": "custom", "custom": {"name": "patch"}}
    item = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 3}
    chatted = await proxy.call(key, [*HELLO, {"role": "assistant", "tool_calls": [call]}])
    refused(chatted, 400, "invalid_request", "messages[1].tool_calls[0].custom")
    response = await post(proxy, key, input=[item])
    refused(response, 400, "invalid_request", "input[0].input")
