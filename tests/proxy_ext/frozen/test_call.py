"""Calls of frozen models through a live proxy, LiteLLM, and a local provider."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import anthropic
import openai
import pytest

from any_agent.errors import AnyAgentError
from any_agent.types import Interaction
from proxy_ext import litellm_shim
from tests.support.fake_provider import Fault, Provider
from tests.support.frozen import (
    ANSWER_USD,
    BODIES,
    EMBEDDING_USD,
    SECRET,
    VARIABLE,
    calls,
    chat_body,
    entry,
    events_of,
    models,
    provider_of,
    refused,
    said,
    secret_in_environment,
    settings,
    streamed,
)
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.sessions import finalize

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def litellm() -> None:
    """As in a service: its library takes some of its modules from its app."""
    litellm_shim.load_app()


@pytest.fixture
async def provider(litellm: None) -> AsyncIterator[Provider]:
    made = Provider()
    with secret_in_environment():
        async with made.serve():
            yield made


@pytest.fixture
async def proxy(start: Start, provider: Provider, tmp_path: Path) -> Proxy:
    return await begin(start, provider, tmp_path)


async def begin(start: Start, provider: Provider, folder: Path, *more: str) -> Proxy:
    down = entry("down", "http://127.0.0.1:1/v1", "openai/gpt-judge")
    lines = settings([*models(provider.url), down], *more)
    proxy = await start(*lines, provider=provider_of(folder, lines), admit=100)
    return proxy


async def only(proxy: Proxy, session: dict[str, Any]) -> Interaction:
    """The one call that a session has recorded."""
    (recorded,) = await proxy.recorded(session["session_id"])
    assert isinstance(recorded, Interaction)
    return recorded


def is_untrainable(recorded: Interaction) -> bool:
    assert recorded.untrainable_reason == "frozen_model"
    return not (recorded.output_ids.size or recorded.prompt_delta_ids.size or recorded.parent_id)


def holding(folder: Path, text: str) -> list[Path]:
    """The files that have it in them."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [file for file in files if text.encode() in file.read_bytes()]


@pytest.mark.parametrize(("path", "model"), calls())
@pytest.mark.service
async def test_a_frozen_call_is_answered_and_recorded_untrainable_with_its_cost(
    proxy: Proxy, provider: Provider, path: str, model: str
) -> None:
    session = await proxy.open(task_id="t")
    for url in (path, path.removeprefix("/v1"), f"/{session['api_key']}{path}"):
        provider.say("Four", " it", " is.")
        named = {"x-any-agent-role": "judge"}
        key = session["api_key"]
        response = await proxy.post(url, {"model": model, **BODIES[path]}, key, **named)
        assert response.status_code == 200, response.text
        body = response.json()
        assert said(path, body) == "Four it is."
        assert body["id"] == response.headers["x-any-agent-interaction"]
        assert response.headers["x-any-agent-session"] == session["session_id"]
        assert "x-any-agent-version" not in response.headers
        assert "cost" not in body["usage"]
    recorded = await proxy.recorded(session["session_id"])
    assert recorded[-1].id == body["id"]
    assert len({each.id for each in recorded}) == len(recorded) == len(provider.requests) == 3
    assert {each.role for each in recorded} == {"judge"}
    for each in recorded:
        assert is_untrainable(each)
        assert each.model == model
        assert each.request["frozen"]["cost_usd"] == pytest.approx(ANSWER_USD)
        assert not each.request["frozen"]["estimated"]
        assert "Four it is." in str(each.output_message)
        assert "Say a number." in str(each.message_delta)
    _, sent, headers = provider.requests[0]
    assert sent["model"] == ("gpt-judge" if model == "judge" else "claude-x")
    assert SECRET in str(headers)
    assert session["api_key"] not in str(provider.requests)


@pytest.mark.parametrize(("path", "model"), calls())
async def test_a_streamed_frozen_call_is_whole_and_recorded_with_its_cost(
    proxy: Proxy, provider: Provider, path: str, model: str
) -> None:
    session = await proxy.open(task_id="t")
    provider.say("Four", " it", " is.")
    events, end = await events_of(proxy, path, {"model": model, **BODIES[path]}, session["api_key"])
    assert streamed(path, events) == "Four it is."
    assert len(events) > 3
    recorded = await only(proxy, session)
    assert is_untrainable(recorded)
    assert recorded.request["frozen"]["cost_usd"] == pytest.approx(ANSWER_USD)
    assert "Four it is." in str(recorded.output_message)
    assert end.endswith("[DONE]\n\n") == path.endswith("completions")
    match path:
        case "/v1/responses":
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["type"] == "response.completed"
            assert {e["response"]["id"] for e in events if "response" in e} == {recorded.id}
            assert events[-1]["response"]["usage"]["output_tokens"] == 3
        case "/v1/messages":
            assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
            assert events[0]["message"]["id"] == recorded.id
        case _:
            assert {event["id"] for event in events} == {recorded.id}
            reasons = [choice["finish_reason"] for e in events for choice in e["choices"]]
            assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
            assert not any("usage" in event for event in events)


async def test_a_stream_that_asks_for_usage_ends_with_it(proxy: Proxy) -> None:
    session = await proxy.open(task_id="t")
    body = chat_body(stream_options={"include_usage": True})
    events, _ = await events_of(proxy, "/v1/chat/completions", body, session["api_key"])
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 3)


async def test_the_official_clients_can_call_frozen_models(
    proxy: Proxy, provider: Provider
) -> None:
    session = await proxy.open(task_id="t")
    key, said, talk = session["api_key"], ("Four", " it", " is."), cast(Any, HELLO)
    both: dict[str, Any] = {"input": ["a", "bc"]}
    async with openai.AsyncOpenAI(api_key=key, base_url=f"{proxy.url}/v1") as client:
        provider.say(*said)
        async with client.responses.stream(model="judge", input="Say a number.") as events:
            response = await events.get_final_response()
        assert response.output_text == "Four it is."
        provider.say(*said)
        async with client.chat.completions.stream(model="claude", messages=talk) as chunks:
            completion = await chunks.get_final_completion()
        assert completion.choices[0].message.content == "Four it is."
        vectors = [await client.embeddings.create(model="vectors", **both)]
        listed = [model.id async for model in client.models.list()]
        assert listed == ["policy", "judge", "vectors", "claude", "down"]
    by_path = openai.AsyncAzureOpenAI(
        api_key=key, azure_endpoint=proxy.url, azure_deployment="vectors", api_version="1"
    )
    async with by_path:
        vectors.append(await by_path.embeddings.create(model="other", **both))
    for found in vectors:
        embeddings = [each.embedding for each in found.data]
        assert embeddings == [[0.5, -0.25, 0.125], [0.5, -0.25, 0.25]]
    async with anthropic.AsyncAnthropic(api_key=key, base_url=proxy.url) as other:
        for model in ("judge", "claude"):
            provider.say(*said)
            async with other.messages.stream(model=model, max_tokens=16, messages=talk) as blocks:
                message = await blocks.get_final_message()
            assert message.content[0].text == "Four it is."  # type: ignore[union-attr]
            assert message.usage.output_tokens == 3
    recorded = await proxy.recorded(session["session_id"])
    assert [each.id for each in recorded[:2]] == [response.id, completion.id]
    assert recorded[2].output_message["embeddings"] == 2
    assert recorded[2].request["frozen"]["cost_usd"] == pytest.approx(EMBEDDING_USD)


async def test_tool_calls_of_a_frozen_model_are_answered_and_recorded(
    proxy: Proxy, provider: Provider
) -> None:
    session = await proxy.open(task_id="t")
    provider.tool_call = ("add", '{"a": 1}')
    body = chat_body(tools=[TOOL])
    whole = (await proxy.post("/v1/chat/completions", body, session["api_key"])).json()
    calls = [whole["choices"][0]["message"]["tool_calls"]]
    await events_of(proxy, "/v1/chat/completions", body, session["api_key"])
    for each in await proxy.recorded(session["session_id"]):
        assert (each.finish_reason, each.tools) == ("tool_calls", [TOOL])
        calls.append(each.output_message["tool_calls"])
    functions = [call["function"] for (call,) in calls]
    assert functions == [{"name": "add", "arguments": '{"a": 1}'}] * 3


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("500", 503, "provider_unavailable"),
        ("429", 429, "provider_busy"),
        ("401", 502, "provider_error"),
        ("400", 400, "provider_refused"),
        ("context", 400, "context_length_exceeded"),
        ("hang", 504, "provider_timeout"),
        (None, 503, "provider_unavailable"),
    ],
)
async def test_a_failing_provider_is_answered_with_an_error_that_hides_its_key(
    start: Start,
    provider: Provider,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: Fault | None,
    status: int,
    code: str,
) -> None:
    # The others are answered, however long that takes here.
    limits = ["frozen.timeout=0.5"] if fault == "hang" else []
    proxy = await begin(start, provider, tmp_path, *limits)
    caplog.set_level(logging.DEBUG)
    session = await proxy.open(task_id="t")
    key, model = session["api_key"], "judge" if fault else "down"
    shown = []
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        for more in ({}, {"stream": True}):
            before = len(provider.requests)
            if fault:
                provider.fail(fault)
            shown.append(await proxy.post(path, {"model": model, **BODIES[path], **more}, key))
            # Of hangs some routes may have answered the status already: none has, here.
            refused(shown[-1], status, code)
            assert len(provider.requests) - before == (1 if fault else 0)
            assert "retry-after" in shown[-1].headers or "x-should-retry" in shown[-1].headers
    # What was paid for, perhaps, is recorded; the session goes on.
    recorded = await proxy.recorded(session["session_id"])
    assert len(recorded) == (6 if fault == "hang" else 0)
    assert all(each.finish_reason == "abort" for each in recorded)
    await proxy.complete(key)
    assert (await proxy.post("/v1/chat/completions", chat_body(), key)).is_success
    await finalize(proxy, session, final_reward=1.0)
    shown += [await proxy.http.get(path) for path in ("/metrics", "/v1/models", "/rl/v1/sessions")]
    assert not any(SECRET in response.text + str(response.headers) for response in shown)
    assert SECRET not in caplog.text and SECRET in str(provider.requests)
    assert not holding(tmp_path, SECRET) and holding(tmp_path, "Say a number.")


async def test_an_unreadable_answer_of_a_provider_is_refused_and_not_recorded(
    proxy: Proxy, provider: Provider
) -> None:
    session = await proxy.open(task_id="t")
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        provider.fail("html")
        response = await proxy.post(path, {"model": "judge", **BODIES[path]}, session["api_key"])
        # What LiteLLM makes of it differs.
        assert response.status_code in (502, 503), response.text
        assert response.json()["error"]["code"] in ("provider_error", "provider_unavailable")
    assert not await proxy.recorded(session["session_id"])


@pytest.mark.parametrize("fault", ["cut", "truncated"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_provider_stream_that_breaks_off_ends_in_an_error_and_costs_an_estimate(
    proxy: Proxy, provider: Provider, path: str, fault: Fault
) -> None:
    session = await proxy.open(task_id="t")
    model = "claude" if path == "/v1/messages" else "judge"
    provider.say(*"abcdef")
    provider.fail(fault)
    events, end = await events_of(proxy, path, {"model": model, **BODIES[path]}, session["api_key"])
    assert "[DONE]" not in end
    assert "broke off" in str(events[-1]), events[-1]
    recorded = await only(proxy, session)
    assert recorded.finish_reason == "abort"
    assert recorded.request["frozen"]["estimated"]
    assert recorded.request["frozen"]["cost_usd"] > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_call_and_is_charged(
    start: Start, provider: Provider, tmp_path: Path, stream: bool
) -> None:
    proxy = await begin(start, provider, tmp_path, "frozen.session_usd=0.01")
    session = await proxy.open(task_id="t")
    provider.say(*"abcdefgh")
    provider.hold() if stream else provider.fail("hang")
    path, headers = "/v1/chat/completions", {"Authorization": f"Bearer {session['api_key']}"}

    async def ask() -> None:
        """Hang up at the first event."""
        body = chat_body(stream=stream)
        async with proxy.http.stream("POST", path, json=body, headers=headers) as response:
            await anext(response.aiter_bytes())

    asking = asyncio.create_task(ask())
    await until(lambda: provider.requests)
    if not stream:
        asking.cancel()
    await asyncio.wait([asking])
    await until(lambda: provider.left == 1, "the provider's client leaving")
    await until(lambda: len(proxy.service.frozen) == 0)
    recorded = await only(proxy, session)
    assert recorded.finish_reason == "abort"
    assert recorded.request["frozen"]["cost_usd"] > 0
    assert proxy.service.frozen.stats.ended["judge", "aborted"] == 1
    again = await proxy.post(path, chat_body(), session["api_key"])
    refused(again, 402, "spend_cap_exceeded")


async def test_finalize_ends_calls_under_way(proxy: Proxy, provider: Provider) -> None:
    session = await proxy.open(task_id="t")
    key, path = session["api_key"], "/v1/chat/completions"
    await proxy.complete(key)
    provider.fail("hang")
    asking = asyncio.create_task(proxy.post(path, chat_body(), key))
    await until(lambda: provider.requests)
    await finalize(proxy, session, final_reward=1.0)
    refused(await asking, 410, "session_closed")
    refused(await proxy.post(path, chat_body(), key), 410, "session_closed")
    assert len(provider.requests) == 1


async def test_a_response_goes_on_from_another(proxy: Proxy, provider: Provider) -> None:
    path = "/v1/responses"
    key, other = [(await proxy.open(task_id="t"))["api_key"] for _ in range(2)]
    first = (await proxy.post(path, {"model": "judge", "input": "a"}, key)).json()
    body = {"model": "judge", "input": "b", "previous_response_id": first["id"]}
    assert (await proxy.post(path, body, key)).status_code == 200
    assert provider.bodies[1]["previous_response_id"] == "resp_1"
    refused(await proxy.post(path, body, other), 404, "previous_response_not_found")
    refused(await proxy.post(path, {**body, "model": "claude"}, key), 400, "invalid_request")


async def test_clients_cannot_set_what_only_the_operator_may_say(
    proxy: Proxy, provider: Provider
) -> None:
    session = await proxy.open(task_id="t")
    key, path = session["api_key"], "/v1/chat/completions"
    response = await proxy.post(path, chat_body(api_base="http://127.0.0.1:9/v1"), key)
    assert "api_base" in refused(response, 400, "unsupported_parameter")
    assert not provider.requests
    body = chat_body(metadata={"model_group": "x"}, user="u")
    assert (await proxy.post(path, body, key)).is_success
    assert "metadata" not in provider.bodies[0]
    assert (await only(proxy, session)).request["recorded"]["metadata"] == {"model_group": "x"}


async def test_a_frozen_call_looks_up_no_foreign_host(
    litellm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither what a client names, nor a tokenizer to count with."""
    provider = Provider()
    asked: list[str] = []
    found = socket.getaddrinfo

    def spy(host: Any, *args: Any, **more: Any) -> Any:
        asked.append(str(host))
        if str(host) != "127.0.0.1":
            raise OSError("a look-up of a name")
        return found(host, *args, **more)

    monkeypatch.setenv(VARIABLE, SECRET)
    async with provider.serve() as url:
        names = {
            "judge": "openai/meta-llama/Llama-3-8b",
            "claude": "anthropic/claude-2",
            "cohere": "openai/command-r",
            "ollama": "ollama/llava",
            "bedrock": "bedrock/anthropic.claude-3-sonnet-20240229-v1:0",
            "converse": "bedrock/converse/amazon.nova-lite-v1:0",
            "gigachat": "gigachat/GigaChat",
            "gemini": "gemini/gemini-2.0-flash",
        }
        base = {name: f"{url}/v1" if name == "judge" else url for name in names}
        lines = settings([entry(name, base[name], names[name]) for name in names])
        made = provider_of(tmp_path, lines)
        assert made is not None
        monkeypatch.setattr(socket, "getaddrinfo", spy)
        deployments = {name: places[0] for name, places in made.deployments.items()}
        for deployment in deployments.values():
            assert deployment.count("one two three") >= 3
        pictures = ["http://images.example/a", "https://images.example/a", "gs://bucket/object"]
        # Some providers' own addresses LiteLLM looks up, too: those are not a client's to say.
        never = {"images.example", "storage.googleapis.com", "huggingface.co"}
        assert not never & set(asked)
        for name, deployment in deployments.items():
            for picture in pictures:
                part = {"type": "image_url", "image_url": {"url": picture, "detail": "high"}}
                file = {"type": "file", "file": {"file_id": picture}}
                for content in (part, file):
                    said = [{"type": "text", "text": "What is it?"}, content]
                    params = {"messages": [{"role": "user", "content": said}]}
                    with contextlib.suppress(AnyAgentError):
                        await deployment.complete("chat", params, within=5)
                    with contextlib.suppress(AnyAgentError):
                        async for _ in deployment.stream("chat", params, within=5):
                            pass
            assert not never & set(asked), name
        from litellm.litellm_core_utils.token_counter import calculate_img_tokens

        assert calculate_img_tokens(pictures[0], mode="high") > 0
        assert not never & set(asked)
        assert provider.requests
        await made.close()
