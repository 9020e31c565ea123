"""One descriptor makes an API: the one of docs/how-to/extend.md through a live proxy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from any_agent.chat import ChatFormat
from any_agent.completions import apis
from any_agent.completions.apis import Api, all_apis, api_at, register_api
from any_agent.direct import EngineOpenAI
from any_agent.direct.transport import model_calls
from any_agent.engine import SGLangEngine
from any_agent.errors import ConfigError
from proxy_ext.web import permissions
from router.metrics import known_routes
from tests.proxy_ext.api.test_chat import say
from tests.support.extend_page import run_code_of
from tests.support.implicit import KEY, settings
from tests.support.proxy import HELLO, Proxy, our_app
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import finalize


@pytest.fixture
def echo() -> Iterator[Api]:
    """The document's API, registered for one test."""
    tables: list[Any] = [apis.APIS, permissions.RULES, permissions.FIXED_PATHS]
    before = [table.copy() for table in tables]
    run_code_of("Add an API")
    yield apis.APIS["echo"]
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


async def test_each_registered_api_is_recorded_continued_streamed_and_exported(
    echo: Api, start: Start, engine: ScriptedEngine, chat: ChatFormat
) -> None:
    proxy = await start(admit=9)
    say(engine, chat, "four")
    session = await proxy.open()
    key = session["api_key"]
    whole = await proxy.post("/v1/echo", {"text": "Say a number."}, key)
    assert (whole.status_code, whole.json()["text"]) == (200, "four")
    assert whole.headers["x-any-agent-interaction"] == whole.json()["id"]
    # The same conversation goes on in another API, token by token.
    answer = {"role": "assistant", "content": "four"}
    await proxy.complete(key, [*HELLO, answer, {"role": "user", "content": "Another one."}])
    say(engine, chat, "five")
    streamed = await proxy.post("/echo", {"text": "And now?", "stream": True}, key)
    events = [orjson.loads(each[6:]) for each in streamed.content.split(b"\n\n") if each]
    first, *texts, last = events
    assert first["id"].startswith("echo-") and last == {"finish_reason": "stop"}
    assert "".join(each["text"] for each in texts) == "five"
    recorded = await proxy.recorded(session["session_id"])
    assert [str(each.continuation) for each in recorded] == ["root", "exact", "root"]
    assert [each.id for each in recorded][0::2] == [whole.json()["id"], first["id"]]
    await finalize(proxy, session, final_reward=1)
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
    proxy = await start(*settings(), admit=9)
    sessions = []
    for text in ("one", "two"):
        response = await proxy.post("/v1/echo", {"text": text}, KEY)
        sessions.append(response.headers["x-any-agent-session"])
    tasks = {proxy.service.sessions.live[id].row.task_id for id in sessions}
    assert len(set(sessions)) == len(tasks) == 2


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
    say(engine, chat, "four")
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
