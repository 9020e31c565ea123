"""One descriptor makes an API: the one of docs/how-to/extend.md through a live proxy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from any_agent.chat import ChatFormat
from any_agent.completions import apis
from any_agent.completions.apis import Api, all_apis, api_at, encode_error, register_api
from any_agent.direct import EngineOpenAI
from any_agent.direct.transport import model_calls
from any_agent.engine import SGLangEngine
from any_agent.errors import ConfigError, InvalidRequest, NotFound
from proxy_ext.web import permissions
from router.metrics import known_routes
from tests.support.extend_page import run_code_of
from tests.support.implicit import KEY, settings
from tests.support.proxy import Proxy, our_app
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture
def echo() -> Iterator[Api]:
    """The document's API, registered for one test."""
    before = dict(apis.APIS), dict(permissions.RULES), set(permissions.FIXED_PATHS)
    run_code_of("Add an API")
    yield apis.APIS["echo"]
    for table, content in zip((apis.APIS, permissions.RULES), before, strict=False):
        table.clear()  # type: ignore[attr-defined]
        table.update(content)  # type: ignore[attr-defined]
    permissions.FIXED_PATHS.clear()
    permissions.FIXED_PATHS.update(before[2])


async def test_each_registered_api_is_recorded_continued_streamed_and_exported(
    echo: Api, start: Start, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    proxy = await start()
    await proxy.admit(9)
    engine.say([*chat.encode("four", special=False), chat.stop_token_ids[0]])
    session = await proxy.open()
    key = session["api_key"]
    whole = await proxy.post("/v1/echo", {"text": "Say a number."}, key)
    assert (whole.status_code, whole.json()["text"]) == (200, "four")
    assert whole.headers["x-any-agent-interaction"] == whole.json()["id"]
    assert whole.json()["id"].startswith("echo-")
    # The same conversation goes on in another API, token by token.
    messages = [
        {"role": "user", "content": "Say a number."},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "Another one."},
    ]
    await proxy.complete(key, messages)
    engine.say([*chat.encode("five", special=False), chat.stop_token_ids[0]])
    streamed = await proxy.post("/echo", {"text": "And now?", "stream": True}, key)
    events = [orjson.loads(each[6:]) for each in streamed.content.split(b"\n\n") if each]
    first, *texts, last = events
    assert first["id"].startswith("echo-") and last == {"finish_reason": "stop"}
    assert "".join(each["text"] for each in texts) == "five"
    recorded = await proxy.recorded(session["session_id"])
    assert [str(each.continuation) for each in recorded] == ["root", "exact", "root"]
    assert [each.id for each in recorded][0::2] == [whole.json()["id"], first["id"]]
    await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key)
    exported = await proxy.export(session["session_id"])
    assert exported[session["session_id"]].keys() == {each.id for each in recorded}


async def test_a_wrong_body_is_refused_by_name(echo: Api, proxy: Proxy) -> None:
    key = (await proxy.open())["api_key"]
    for body in ({}, {"text": 1}, {"text": "x", "temperature": 1}):
        response = await proxy.post("/v1/echo", body, key)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == ("temperature" if len(body) > 1 else "text")
    assert (await proxy.http.get("/v1/echo")).status_code == 405


async def test_conversations_of_each_api_are_told_apart(echo: Api, start: Start) -> None:
    proxy = await start(*settings())
    await proxy.admit(9)
    sessions = []
    for text in ("one", "two"):
        response = await proxy.post("/v1/echo", {"text": text}, KEY)
        sessions.append(response.headers["x-any-agent-session"])
    tasks = {proxy.service.sessions.live[id].row.task_id for id in sessions}
    assert len(set(sessions)) == len(tasks) == 2


async def test_a_call_of_an_implicit_session_is_sampled_as_the_run_is(start: Start) -> None:
    proxy = await start(*settings("sampling.temperature=0.7"))
    await proxy.admit(9)
    response = await proxy.call(KEY)
    (interaction,) = await proxy.recorded(response.headers["x-any-agent-session"])
    assert interaction.gconfig.temperature == 0.7


def test_every_part_learns_of_an_added_api_from_the_registry(echo: Api) -> None:
    assert api_at("/v1/echo") is api_at("/echo") is echo
    assert echo.path in model_calls() and "echo" in known_routes()
    described = our_app().openapi()
    operation = described["paths"]["/v1/echo"]["post"]
    assert operation["summary"] == "Echo" and "429" in operation["responses"]
    schema = described["components"]["schemas"]["echo-request"]
    assert schema["required"] == ["text"] and {"text", "stream"} <= schema["properties"].keys()


async def test_a_direct_client_answers_an_added_api(
    echo: Api, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    engine.say([*chat.encode("four", special=False), chat.stop_token_ids[0]])
    real = SGLangEngine(engine.url, decode=chat.decode)
    async with EngineOpenAI(real, chat, context_length=512) as client:
        answer: Any = await client.post("/echo", body={"text": "Say a number."}, cast_to=object)
        assert answer["text"] == "four" and len(client.interactions) == 1
    await real.close()


def test_a_taken_name_or_path_is_refused() -> None:
    chat = all_apis()[0]
    for name, path in (("chat", "/mine"), ("mine", chat.path), ("mine", "no path")):
        with pytest.raises(ConfigError):
            register_api(Api(name, path, chat.parse))
    assert api_at("/mine") is None


def test_errors_have_the_form_of_the_paths_api() -> None:
    error = InvalidRequest("x", param="y")
    assert encode_error(error, "/v1/chat/completions")[0] == error.body()
    for path in ("/messages", "/v1/messages/count_tokens", "/sess-key/v1/messages"):
        body, headers = encode_error(NotFound("x"), path)
        assert body["type"] == "error" and headers["request-id"] == body["request_id"]
    assert "type" not in encode_error(error, "/v1/messages_of_mine")[0]
