"""A service whose URL stands in a file: it comes, goes and moves, and its clients follow."""

from __future__ import annotations

import asyncio
import os
import stat
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import httpx
import pytest
from openai import AsyncOpenAI

from any_agent import AgentSession
from any_agent.client import service_url
from any_agent.client.aiohttp_transport import AiohttpTransport
from any_agent.client.retry_transport import RetryTransport
from any_agent.client.rl_client import RLClient
from any_agent.client.service_url import moved, url_file
from any_agent.errors import ConfigError, ServiceUnavailable
from any_agent.sdk import find_service
from any_agent.sdk.http_patches import patches
from any_agent.sdk.session import AsyncSession
from tests.support.errors import fails_with
from tests.support.middleman import between
from tests.support.sdk.hops import CLIENTS, KEY, Get, Server, in_session
from tests.support.sdk_fixtures import ADMIN, Serve, Served

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tests.support.sdk.hops")
SAID = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Another test's service may have had the port that this test's first server gets.
    monkeypatch.setattr(service_url, "known_files", {})
    return tmp_path / "url"


def put(place: Path, url: str) -> None:
    place.write_text(f"{url}\n")


def write(place: Path, url: str) -> None:
    """As the service does, and seen at once."""
    put(place, url)
    url_file(place.as_uri(), "url").read()


def test_the_url_in_a_service_file_is_read_anew(place: Path) -> None:
    service = find_service(place.as_uri())
    assert (service.named, service.url) == (place.as_uri(), place.as_uri())
    write(place, "http://10.0.0.1:8000/v1/")
    assert service.url == "http://10.0.0.1:8000"
    # Neither a file that is away nor an empty one says that the service is nowhere.
    for gone in (lambda: place.write_text(""), place.unlink):
        gone()
        assert url_file(place.as_uri(), "url").read() == "http://10.0.0.1:8000"
    write(place, "https://10.0.0.2:9000")
    assert service.url == "https://10.0.0.2:9000"
    assert find_service(f"file://localhost{place}").url == service.url


def test_a_file_that_is_not_named_by_its_full_path_is_refused() -> None:
    for url in ("file:url", "file://host/shared/url", "file:///x?y", "file:///x#y"):
        with fails_with(ConfigError, "ANY_AGENT_URL", "file:///shared/run/url"):
            find_service(environ={"ANY_AGENT_URL": url})


async def test_a_file_that_holds_no_url_is_refused_without_a_word_of_it(
    tmp_path: Path, place: Path
) -> None:
    for text in ("10.0.0.1:8000", "http://me:secret@host", "file:///other"):
        put(place, text)
        with fails_with(ConfigError, f"the file {place}") as refused:
            find_service(place.as_uri())
        assert "secret" not in str(refused.value)
        async with RLClient(place.as_uri()) as client:
            with fails_with(ConfigError, f"the file {place}"):
                await client.run_info()
    # Nobody waits for a pipe.
    os.unlink(place)
    os.mkfifo(place)
    for nothing in (place, tmp_path):
        assert find_service(nothing.as_uri()).url == nothing.as_uri()


def test_a_file_that_others_may_write_or_replace_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(place, "http://10.0.0.1:8000")
    place.chmod(0o646)
    with fails_with(ConfigError, f"write the file {place}"):
        find_service(place.as_uri())
    place.chmod(0o664)
    place.parent.chmod(0o777)
    with fails_with(ConfigError, f"the file {place}", "its folder"):
        find_service(place.as_uri())
    place.parent.chmod(0o1777)  # as /tmp
    assert url_file(place.as_uri(), "url").read() == "http://10.0.0.1:8000"
    real = os.fstat

    def anothers(number: int) -> os.stat_result:
        fields = list(real(number))
        fields[stat.ST_UID] = 4711
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", anothers)
    with fails_with(ConfigError, f"the file {place}", "root"):
        find_service(place.as_uri())


async def test_a_service_that_was_not_there_yet_is_waited_for(serve: Serve, place: Path) -> None:
    async with RLClient(place.as_uri(), retry_for=0.1) as client:
        with fails_with(ServiceUnavailable, place):
            await client.run_info()
    opening = AgentSession(url=place.as_uri(), api_key=ADMIN)

    async def opened() -> AsyncSession:
        return await opening.__aenter__()

    waits = asyncio.create_task(opened())
    served = await serve()
    write(place, served.url)
    session = await waits
    assert session.base_url == f"{served.url}/v1"
    await session.abort()
    await opening.__aexit__(None, None, None)


@pytest.mark.parametrize("get", CLIENTS)
async def test_clients_that_know_the_earlier_place_are_sent_to_the_new_one(
    get: Get, service: Server, elsewhere: Server, place: Path
) -> None:
    write(place, service.url)
    with in_session(place.as_uri()):
        await get(f"{service.url}/v1/models", {})
        write(place, elsewhere.url)
        await get(f"{service.url}/v1/models", {})
        # Outside of every session it has one key, which is not theirs to send elsewhere.
        assert [path for path, _ in elsewhere.seen] == ["/v1/models"]
        await get(f"{service.url}/rl/v1/sessions", {})
    assert elsewhere.keys == [f"Bearer {KEY}"]
    assert [head.get("host") for _, head in elsewhere.seen] == [
        elsewhere.url.removeprefix("http://")
    ]
    assert [path for path, _ in service.seen] == ["/v1/models", "/rl/v1/sessions"]
    await get(f"{service.url}/v1/models", {})
    assert len(elsewhere.seen) == 1


async def test_the_key_goes_to_nobody_who_came_to_the_earlier_place(
    service: Server, elsewhere: Server, place: Path
) -> None:
    """A client that bears the session's key itself, in no session: it is the service's."""
    write(place, service.url)
    write(place, elsewhere.url)
    patches.acquire()
    try:
        for get in CLIENTS:
            if "auth" not in get.__name__:
                await get(f"{service.url}/v1/models", {"Authorization": f"Bearer {KEY}"})
                await get(f"{service.url}/v1/models", {"Authorization": "Bearer sk-proj-mine"})
    finally:
        patches.release()
    assert set(elsewhere.keys) == {f"Bearer {KEY}"}
    assert set(service.keys) == {"Bearer sk-proj-mine"}
    assert len(service.keys) == len(elsewhere.keys) > 3


async def test_a_client_that_waits_is_sent_to_the_new_place(elsewhere: Server, place: Path) -> None:
    write(place, "http://127.0.0.1:9")

    class Moves(AiohttpTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            try:
                return await super().handle_async_request(request)
            except httpx.ConnectError:
                write(place, elsewhere.url)
                raise

    transport = RetryTransport(Moves(), patience=10.0)
    async with httpx.AsyncClient(transport=transport) as http:
        response = await http.post(
            "http://127.0.0.1:9/v1/x", json={"a": 1}, headers={"Authorization": f"Bearer {KEY}"}
        )
    assert response.status_code == 200
    assert [path for path, _ in elsewhere.seen] == ["/v1/x"]


def test_only_urls_below_the_earlier_place_are_moved(place: Path) -> None:
    write(place, "http://10.9.0.1:80/here")
    write(place, "http://10.9.0.2:81")
    assert moved("http://10.9.0.1:80/here/v1/x?y=%2F") == "http://10.9.0.2:81/v1/x?y=%2F"
    for other in (
        "http://10.9.0.1:80/hereafter/v1",
        "http://10.9.0.1:80/",
        "http://10.9.0.2:81/v1",
    ):
        assert moved(other) is None
    # Another one came to where this one was.
    beside = place.with_name("other")
    write(beside, "http://10.9.0.1:80/here")
    assert moved("http://10.9.0.1:80/here/v1/x") is None
    write(beside, "http://10.9.0.3:80")
    assert moved("http://10.9.0.1:80/here/v1/x") == "http://10.9.0.3:80/v1/x"
    # Back again: the other place is the earlier one now.
    write(place, "http://10.9.0.1:80/here")
    assert moved("http://10.9.0.1:80/here/v1/x") is None
    assert moved("http://10.9.0.2:81/v1/x") == "http://10.9.0.1:80/here/v1/x"


@pytest.mark.parametrize("name", ["ANY_AGENT_URL", "OPENAI_BASE_URL"])
@pytest.mark.service
async def test_an_agent_finds_its_service_by_the_file_in_its_environment(
    served: Served, place: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also OpenAI's own client, which takes the file's URL for the service's."""
    write(place, served.url)
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.setenv(name, place.as_uri())
    monkeypatch.setenv("OPENAI_API_KEY", served.tenant_key)
    async with AgentSession("task") as session:
        base_url = session.base_url if name == "ANY_AGENT_URL" else None
        async with AsyncOpenAI(base_url=base_url, max_retries=0) as client:
            await client.chat.completions.create(**SAID)  # type: ignore[call-overload]
        await session.set_reward(1.0)
    assert await served.state(session.session_id) == "finalized"


@pytest.mark.service
async def test_a_session_goes_on_where_its_service_is(served: Served, place: Path) -> None:
    """Its calls, by clients of before and new ones, its reward and its end."""
    async with AsyncExitStack() as stack:
        earlier = await stack.enter_async_context(between(served.url))
        write(place, earlier)
        url = place.as_uri()
        async with AgentSession("task", url=url, api_key=served.tenant_key) as session:
            client = session.openai()
            await client.chat.completions.create(**SAID)  # type: ignore[call-overload]
            assert session.base_url == f"{earlier}/v1"
            await stack.aclose()
            later = await stack.enter_async_context(between(served.url))
            write(place, later)
            await client.chat.completions.create(**SAID)  # type: ignore[call-overload]
            assert session.base_url == f"{later}/v1"
            # As an agent has it that read the URL when it began.
            url = f"{earlier}/v1/chat/completions"
            async with aiohttp.ClientSession() as http, http.post(url, json=SAID) as answer:
                assert answer.status == 200
            await session.set_reward(1.0)
            await client.close()
        info = await served.info(session.session_id)
    assert (info["state"], info["interactions"]) == ("finalized", 3)
