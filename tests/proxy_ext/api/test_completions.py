"""`/v1/completions`: recorded like a chat, and continued exactly by text or by ids."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from any_agent.chat import ChatFormat
from tests.proxy_ext.api.test_chat import say
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.frozen import events_of
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Restart
from tests.support.retries import Agent, hang_up
from tests.support.scripted_engine import ScriptedEngine

PATH = "/v1/completions"


async def ask(proxy: Proxy, key: str, prompt: Any, **fields: Any) -> httpx.Response:
    return await proxy.post(PATH, {"model": "m", "prompt": prompt, **fields}, key)


async def complete(proxy: Proxy, key: str, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = await ask(proxy, key, prompt, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.fixture
async def session(proxy: Proxy) -> dict[str, Any]:
    return await proxy.open()


async def test_a_text_is_gone_on_with_and_recorded(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, session: dict[str, Any]
) -> None:
    ids = say(engine, chat, " 2 and 3 ")
    response = await ask(proxy, session["api_key"], "1 and", max_tokens=40)
    answer = response.json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    # Nothing of a text is trimmed.
    expected = {"index": 0, "text": " 2 and 3 ", "logprobs": None, "finish_reason": "stop"}
    assert choice == expected
    prompt = chat.tokenizer.encode("1 and")
    assert engine.requests[0]["input_ids"] == prompt
    counts = (len(prompt), len(ids), len(prompt) + len(ids))
    assert tuple(answer["usage"].values()) == counts
    (interaction,) = await proxy.recorded(session["session_id"])
    assert interaction.id == answer["id"] == response.headers["x-any-agent-interaction"]
    assert interaction.prompt_delta_ids.tolist() == prompt
    assert interaction.output_ids.tolist() == ids
    assert interaction.trainable


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_begins_with_a_recorded_text_continues_its_ids(
    restart: Restart, engine: ScriptedEngine, chat: ChatFormat, restarted: bool
) -> None:
    proxy = await restart()
    opened = await proxy.open()
    key, text = opened["api_key"], "Q: 1 + 1?\nA:"
    past: list[int] = []
    for turn in range(3):
        # Not as the tokenizer would cut it: only the recorded ids can be right.
        ids = [i for character in f" {turn}2" for i in chat.tokenizer.encode(character)]
        engine.say(ids)
        answer = await complete(proxy, key, text, max_tokens=30)
        request = engine.requests[-1]["input_ids"]
        assert request[: len(past)] == past
        past = [*request, *ids]
        text += answer["choices"][0]["text"] + "\nQ: more?\nA:"
        if restarted:
            proxy = await restart()
    recorded = await proxy.recorded(opened["session_id"])
    assert [i.parent_id for i in recorded] == [None, recorded[0].id, recorded[1].id]
    assert [i.continuation for i in recorded] == ["root", "exact", "exact"]
    added = recorded[1].prompt_delta_ids.tolist()
    assert added == chat.tokenizer.encode("\nQ: more?\nA:")
    assert chat.decode(past) == text.removesuffix("\nQ: more?\nA:")


async def test_what_begins_with_recorded_ids_continues_them(
    proxy: Proxy, engine: ScriptedEngine, session: dict[str, Any]
) -> None:
    key, prompt = session["api_key"], [30, 31, 32]
    await complete(proxy, key, prompt, max_tokens=3)
    (first,) = await proxy.recorded(session["session_id"])
    longer = [*prompt, *first.output_ids.tolist(), 40, 41]
    await complete(proxy, key, longer, max_tokens=3)
    await complete(proxy, key, [30, 31, 33], max_tokens=3)
    _, second, other = await proxy.recorded(session["session_id"])
    assert engine.requests[1]["input_ids"] == longer
    assert (second.parent_id, second.prompt_delta_ids.tolist()) == (first.id, [40, 41])
    assert other.parent_id is None


async def test_a_text_goes_on_from_its_stop_string_or_not_at_all(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, session: dict[str, Any]
) -> None:
    key = session["api_key"]
    say(engine, chat, "think\nObserved: ")
    answer = await complete(proxy, key, "Go:", stop="\nObserved:", max_tokens=60)
    text = answer["choices"][0]["text"]
    assert (text, answer["choices"][0]["finish_reason"]) == ("think", "stop")
    await complete(proxy, key, f"Go:{text}\nObserved: 5", max_tokens=3)
    await complete(proxy, key, f"Go:{text} and what else", max_tokens=3)
    first, exact, root = await proxy.recorded(session["session_id"])
    assert chat.decode(first.output_ids.tolist()).endswith("\nObserved:")
    assert exact.parent_id == first.id
    assert chat.decode(exact.prompt_delta_ids.tolist()) == " 5"
    assert root.parent_id is None


async def test_chats_and_texts_do_not_continue_each_other(
    proxy: Proxy, session: dict[str, Any]
) -> None:
    key = session["api_key"]
    await complete(proxy, key, "1 and", max_tokens=2)
    await proxy.complete(key, HELLO)
    await complete(proxy, key, "1 and", max_tokens=2)
    assert [i.parent_id for i in await proxy.recorded(session["session_id"])] == [None] * 3


async def test_each_choice_of_several_prompts_is_recorded(
    proxy: Proxy, engine: ScriptedEngine, chat: ChatFormat, session: dict[str, Any]
) -> None:
    prompts = ["a b", "c d e"]
    answer = await complete(proxy, session["api_key"], prompts, n=2, max_tokens=3, echo=True)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    asked = [chat.tokenizer.encode(p) for p in prompts]
    recorded = {i.id: i for i in await proxy.recorded(session["session_id"])}
    for k, choice in enumerate(answer["choices"]):
        interaction = recorded[f"{answer['id']}.{k}"]
        assert interaction.prompt_delta_ids.tolist() == asked[k // 2]
        assert choice["text"] == prompts[k // 2] + interaction.output_message["content"]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, asked))


async def test_a_marked_retry_after_a_restart_gets_the_same_answers(
    restart: Restart, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    proxy = await restart()
    session = await proxy.open()
    body = {"model": "m", "prompt": ["a", "b"], "n": 2, "stop": ["STOP"], "logprobs": 1}
    for text in ("one", "two STOP", "three", "four"):
        say(engine, chat, text)
    agent = Agent(proxy, engine, session, path=PATH, **body)
    go_on = engine.hold(1)
    asked = agent.begin(0)
    await until(lambda: len(engine.requests) == 4)
    await hang_up(asked)
    await agent.vacant()
    go_on.set()
    await agent.answered()
    agent.proxy = proxy = await restart()
    answer = (await agent.ask(1)).json()
    assert len(engine.requests) == 4
    recorded = {i.id: i for i in await agent.recorded()}
    assert answer["usage"]["prompt_tokens"] == 2
    said = []
    for k, choice in enumerate(answer["choices"]):
        interaction = recorded[f"{answer['id']}.{k}"]
        assert choice["text"] == interaction.output_message["content"]
        assert choice["logprobs"]["token_logprobs"] == interaction.output_logprobs.tolist()
        said.append(choice["text"])
    assert sorted(said) == ["four", "one", "three", "two "]


async def test_a_stream_says_what_the_whole_does(
    proxy: Proxy, chat: ChatFormat, session: dict[str, Any]
) -> None:
    key, fields = session["api_key"], {"max_tokens": 6, "logprobs": 2}
    for prompt in ("1 and", chat.tokenizer.encode("1 and")):
        whole = await complete(proxy, key, prompt, **fields)
        body = {"prompt": prompt, **fields, "stream_options": {"include_usage": True}}
        (*chunks, usage), end = await events_of(proxy, PATH, body, key)
        assert end.endswith("[DONE]\n\n")
        assert usage["usage"] == whole["usage"]
        choices = [c for event in chunks for c in event["choices"]]
        assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"]
        assert choices[-1]["finish_reason"] == "length"
        told = whole["choices"][0]["logprobs"]
        streamed = {
            part: [x for c in choices if c["logprobs"] for x in c["logprobs"][part]]
            for part in ("tokens", "token_logprobs", "text_offset", "top_logprobs")
        }
        assert [len(part) for part in streamed.values()] == [6] * 4
        assert streamed["token_logprobs"] == pytest.approx(told["token_logprobs"])
        assert all(streamed[part] == told[part] for part in ("tokens", "text_offset"))
        assert all(len(top) <= 2 for top in told["top_logprobs"])


async def test_refused_requests_name_their_parameter(proxy: Proxy, session: dict[str, Any]) -> None:
    key = session["api_key"]
    for prompt, fields, code, says in (
        ([1, "a"], {}, "invalid_request", "prompt"),
        ([10**6], {}, "invalid_request", "token id"),
        ("long " * 5000, {}, "context_length_exceeded", "context length"),
        ([20] * 3000, {}, "context_length_exceeded", "context length"),
        ("x", {"suffix": "y"}, "unsupported_parameter", "suffix"),
    ):
        response = await ask(proxy, key, prompt, **fields)
        refusal(response, 400, code, says)
    assert await proxy.recorded(session["session_id"]) == []
