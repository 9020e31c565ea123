"""Chat calls over HTTP: answers, records, exact continuation, parameters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest

from any_agent.chat import ChatFormat
from any_agent.types import Continuation
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import HELLO, Proxy
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine


def say(engine: ScriptedEngine, chat: ChatFormat, text: str) -> list[int]:
    """Queue an answer that ends its turn; its ids."""
    ids = [*chat.tokenizer.encode(text), chat.stop_token_ids[0]]
    engine.say(ids)
    return ids


async def test_a_whole_answer(proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat) -> None:
    session = await proxy.open()
    ids = say(engine, chat, "4 and 2")
    response = await proxy.call(session["api_key"], max_tokens=20)
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "gpt-4o"
    assert answer["choices"][0]["message"]["content"] == "4 and 2"
    assert answer["choices"][0]["finish_reason"] == "stop"
    prompt = engine.requests[0]["input_ids"]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "total_tokens": len(prompt) + len(ids),
    }
    assert response.headers["x-any-agent-session"] == session["session_id"]
    assert response.headers["x-any-agent-interaction"] == answer["id"]
    assert response.headers["x-any-agent-version"] == "0"
    assert "x-any-agent-overrides" not in response.headers
    (interaction,) = await proxy.recorded(session["session_id"])
    assert interaction.id == answer["id"]
    assert interaction.prompt_delta_ids.tolist() == prompt
    assert interaction.output_ids.tolist() == ids
    assert interaction.output_versions.tolist() == [0] * len(ids)
    assert interaction.output_logprobs.tolist() == [-0.5 - (i % 7) / 8 for i in ids]
    assert interaction.trainable


async def test_whole_and_streamed_record_the_same(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    for stream in (False, True):
        say(engine, chat, "one 2 thrée")
        if stream:
            events, done = await proxy.stream(session["api_key"], max_tokens=30)
        else:
            await proxy.complete(session["api_key"], max_tokens=30)
    assert done
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
    assert text == "one 2 thrée"
    assert [e["choices"][0]["finish_reason"] for e in events][-2:] == [None, "stop"]
    assert len({e["id"] for e in events}) == 1
    first, second = await proxy.recorded(session["session_id"])
    for field in ("prompt_delta_ids", "output_ids", "output_logprobs", "output_versions"):
        assert getattr(first, field).tolist() == getattr(second, field).tolist(), field
    assert first.output_message == second.output_message
    assert first.finish_reason == second.finish_reason == "stop"
    assert second.id == events[0]["id"]


async def test_stream_usage_and_logprobs(proxy: Proxy) -> None:
    session = await proxy.open()
    events, _ = await proxy.stream(
        session["api_key"], stream_options={"include_usage": True}, logprobs=True
    )
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8
    entries = [
        entry
        for event in events[:-1]
        if event["choices"][0]["logprobs"]
        for entry in event["choices"][0]["logprobs"]["content"]
    ]
    (interaction,) = await proxy.recorded(session["session_id"])
    assert [e["logprob"] for e in entries] == interaction.output_logprobs.tolist()


async def test_a_stream_is_real(proxy: Proxy, engine: ScriptedEngine) -> None:
    """A chunk leaves while the engine still samples."""
    session = await proxy.open()
    event = engine.hold(3)
    seen = False
    body = {"messages": HELLO, "max_tokens": 8, "stream": True, "logprobs": True}
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    url = "/v1/chat/completions"
    async with proxy.http.stream("POST", url, json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if line and not seen and orjson.loads(line[6:])["choices"][0]["logprobs"]:
                seen = True
                assert len(engine.running) == 1
                event.set()
    assert seen


async def turns(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, key: str, count: int
) -> list[dict[str, Any]]:
    messages = list(HELLO)
    for turn in range(count):
        say(engine, chat, f"answer {turn}")
        streamed = turn % 2 == 1
        if streamed:
            events, _ = await proxy.stream(key, messages, max_tokens=30)
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
        else:
            text = (await proxy.complete(key, messages, max_tokens=30))["choices"][0]["message"][
                "content"
            ]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
    return messages


async def test_every_turn_continues_its_parents_ids(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    await turns(proxy, engine, chat, session["api_key"], 4)
    recorded = await proxy.recorded(session["session_id"])
    assert [i.parent_id for i in recorded] == [None, *(i.id for i in recorded[:-1])]
    for (before, after), parent in zip(pairwise(engine.requests), recorded, strict=False):
        prefix = [*before["input_ids"], *parent.output_ids.tolist()]
        assert after["input_ids"][: len(prefix)] == prefix
        assert len(after["input_ids"]) > len(prefix)
    # A turn stores what it adds.
    assert sum(len(i.prompt_delta_ids) + len(i.output_ids) for i in recorded) == len(
        engine.requests[-1]["input_ids"]
    ) + len(recorded[-1].output_ids)
    finalized = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, session["api_key"])
    assert finalized.status_code == 200
    rows = (await proxy.export(session["session_id"]))[session["session_id"]]
    for request, interaction in zip(engine.requests, recorded, strict=True):
        row = rows[interaction.id]
        assert row["input_ids"] == [*request["input_ids"], *interaction.output_ids.tolist()]
        assert sum(row["loss_mask"]) == len(interaction.output_ids)
    concat = await proxy.export(session["session_id"], style="concat")
    (row,) = concat[session["session_id"]].values()
    assert sum(row["loss_mask"]) == sum(len(i.output_ids) for i in recorded)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("back", ["    return a + b\n", "return a + b"])
async def test_white_space_at_an_answers_ends_stays_and_costs_no_parent(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, stream: bool, back: str
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    say(engine, chat, "    return a + b\n")
    if stream:
        events, _ = await proxy.stream(key, tools=tools, max_tokens=40)
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
    else:
        text = (await proxy.complete(key, tools=tools, max_tokens=40))["choices"][0]["message"][
            "content"
        ]
    assert text == "    return a + b\n"
    say(engine, chat, "ok")
    # Some frameworks trim what they send back.
    messages = [*HELLO, {"role": "assistant", "content": back}, {"role": "user", "content": "go"}]
    await proxy.complete(key, messages=messages, tools=tools)
    first, second = await proxy.recorded(session["session_id"])
    assert first.output_message["content"] == text
    assert second.parent_id == first.id and second.continuation is Continuation.EXACT


async def test_rewritten_history_starts_a_new_root(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    messages = await turns(proxy, engine, chat, session["api_key"], 2)
    changed = [{"role": "user", "content": "Say another number."}, *messages[1:]]
    say(engine, chat, "7")
    await proxy.complete(session["api_key"], changed, max_tokens=30)
    # The unchanged history goes on where it was.
    say(engine, chat, "8")
    await proxy.complete(session["api_key"], messages, max_tokens=30)
    first, second, root, third = await proxy.recorded(session["session_id"])
    assert [root.parent_id, str(root.continuation)] == [None, "root"]
    assert third.parent_id == second.id
    assert second.parent_id == first.id


async def test_two_children_of_one_parent(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    session = await proxy.open()
    messages = await turns(proxy, engine, chat, session["api_key"], 1)
    for _ in range(2):
        say(engine, chat, "x")
        await proxy.complete(session["api_key"], messages, max_tokens=30)
    parent, one, two = await proxy.recorded(session["session_id"])
    assert one.parent_id == two.parent_id == parent.id


async def test_an_answer_cut_off_is_branched_from_and_counted(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    """Where the ids cannot be continued exactly, the record says so."""
    session = await proxy.open()
    answer = await proxy.complete(session["api_key"], max_tokens=3)
    assert answer["choices"][0]["finish_reason"] == "length"
    text = answer["choices"][0]["message"]["content"]
    messages = [*HELLO, {"role": "assistant", "content": text}, HELLO[0]]
    await proxy.complete(session["api_key"], messages)
    first, second = await proxy.recorded(session["session_id"])
    if second.parent_id is None:
        assert second.branch_reason
    else:
        prefix = [*engine.requests[0]["input_ids"], *first.output_ids.tolist()]
        assert engine.requests[1]["input_ids"][: len(prefix)] == prefix


async def test_tools(proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat) -> None:
    session = await proxy.open()
    function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    say(engine, chat, text)
    answer = await proxy.complete(session["api_key"], tools=tools, max_tokens=100)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert orjson.loads(call["function"]["arguments"]) == {"a": 1}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    say(engine, chat, "It is 2")
    history = [*HELLO, choice["message"], result]
    await proxy.complete(session["api_key"], history, tools=tools, max_tokens=30)
    first, second = await proxy.recorded(session["session_id"])
    assert second.parent_id == first.id


async def test_train_sessions_sample_as_the_run_says(proxy: Proxy, engine: ScriptedEngine) -> None:
    session = await proxy.open()
    response = await proxy.call(
        session["api_key"], temperature=0.2, top_p=0.9, top_k=5, seed=3, user="me"
    )
    assert response.status_code == 200
    sampling = engine.requests[0]["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1.0, -1)
    overrides = orjson.loads(response.headers["x-any-agent-overrides"])
    assert overrides == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": None}
    (interaction,) = await proxy.recorded(session["session_id"])
    asked = {"temperature": 0.2, "top_p": 0.9, "top_k": 5, "seed": 3}
    assert interaction.request["overridden"] == asked
    assert interaction.request["recorded"] == {"user": "me"}
    assert interaction.trainable


async def test_eval_sessions_sample_as_the_agent_says(proxy: Proxy, engine: ScriptedEngine) -> None:
    session = await proxy.open(mode="eval")
    response = await proxy.call(session["api_key"], temperature=0, top_p=0.9, stop=["zz"])
    assert response.status_code == 200
    assert "x-any-agent-overrides" not in response.headers
    sampling = engine.requests[0]["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["stop"]) == (0, 0.9, ["zz"])


async def test_tokens_are_the_least_of_all_limits(start: Start, engine: ScriptedEngine) -> None:
    proxy = await start("sampling.max_new_tokens=20", "engine.context_length=40")
    session = await proxy.open(mode="eval")
    for asked in (5, 30):
        await proxy.complete(session["api_key"], max_tokens=asked)
    await proxy.complete(session["api_key"], max_tokens=30, max_completion_tokens=3)
    prompt = len(engine.requests[0]["input_ids"])
    got = [r["sampling_params"]["max_new_tokens"] for r in engine.requests]
    assert got == [5, min(20, 40 - prompt), 3]


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_the_answer_says_that_fewer_tokens_were_allowed(start: Start, mode: str) -> None:
    proxy = await start("sampling.max_new_tokens=20")
    await proxy.admit(10)
    session = await proxy.open(mode=mode)
    for stream in (False, True):
        response = await proxy.call(session["api_key"], max_tokens=30, stream=stream)
        assert response.status_code == 200, response.text
        overrides = orjson.loads(response.headers["x-any-agent-overrides"])
        assert overrides == {"max_tokens": 20}
        response = await proxy.call(session["api_key"], max_tokens=20, stream=stream)
        assert "x-any-agent-overrides" not in response.headers
    recorded = await proxy.recorded(session["session_id"])
    asked = [interaction.request.get("overridden") or {} for interaction in recorded]
    assert asked == [{"max_tokens": 30}, {}] * 2


async def test_ways_to_name_the_session(proxy: Proxy) -> None:
    session = await proxy.open()
    key, id = session["api_key"], session["session_id"]
    dummy = {"authorization": "Bearer DUMMY"}
    ways: list[tuple[str, dict[str, str]]] = [
        ("", {"authorization": f"Bearer {key}"}),
        ("", {"authorization": f"bearer {key}"}),
        ("", {"x-api-key": key}),
        ("", {"x-any-agent-session": id}),
        (f"/{key}", {}),
        (f"/{key}", dummy),
        (f"/{key}", dummy | {"x-api-key": "other"}),
        (f"/{id}", dummy),
    ]
    for prefix, headers in ways:
        for path in ("/v1/chat/completions", "/chat/completions"):
            body = {"messages": HELLO, "max_tokens": 2}
            response = await proxy.post(prefix + path, body, **headers)
            assert response.status_code == 200, (prefix, headers, response.text)
            assert response.headers["x-any-agent-session"] == id


async def test_models(proxy: Proxy) -> None:
    for path in ("/v1/models", "/models"):
        (model,) = (await proxy.http.get(path)).json()["data"]
        assert model["id"] == "policy"
        assert model["context_length"] == 2048
        one = await proxy.http.get(f"{path}/policy")
        assert one.json() == model
        refusal(await proxy.http.get(f"{path}/gpt-5"), 404, "model_not_found", "called 'policy'")


async def test_models_for_anthropics_clients(proxy: Proxy) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    page = (await proxy.http.get("/v1/models", headers=headers)).json()
    (model,) = page["data"]
    assert (model["type"], model["id"], model["display_name"]) == ("model", "policy", "policy")
    assert model["created_at"] == "1970-01-01T00:00:00Z"
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("policy", "policy", False)
    assert (await proxy.http.get("/v1/models/policy", headers=headers)).json() == model
    refusal(
        await proxy.http.get("/v1/models/x", headers=headers), 404, "model_not_found", "'policy'"
    )


async def test_a_session_named_in_the_query(proxy: Proxy) -> None:
    one, two = await proxy.open(), await proxy.open()
    body = {"messages": HELLO, "max_tokens": 2}
    path = "/v1/chat/completions?session_id="
    response = await proxy.post(path + two["session_id"], body, one["api_key"])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "session_mismatch"
    for session in (one, two):
        assert await proxy.recorded(session["session_id"]) == []
    for key in (one["api_key"], None):  # without a key: where everybody is the operator
        response = await proxy.post(path + one["session_id"], body, key)
        assert response.status_code == 200, response.text
        assert response.headers["x-any-agent-session"] == one["session_id"]
    assert len(await proxy.recorded(one["session_id"])) == 2
