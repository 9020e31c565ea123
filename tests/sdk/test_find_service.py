"""Where the service is, with which key, and what is said of one that is none."""

from __future__ import annotations

import pytest

from any_agent import AgentSession
from any_agent.errors import ConfigError, Unauthenticated
from any_agent.sdk import find_service
from any_agent.sdk.find_service import ServiceAddress, shared_client
from tests.support.errors import fails_with
from tests.support.sdk_fixtures import Serve, Served

URL, KEY = "http://10.0.0.1:8000", "sk-tenant.x"
SESSION_KEY = "sk-v1.0.aaaaaaaaaaaaaaaaaaaaaaaa.bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"


def test_the_environment_names_the_service_and_its_key() -> None:
    ours, openai = "ANY_AGENT_URL", "OPENAI_BASE_URL"
    for environ, url, key, named_by in (
        ({ours: URL, openai: "http://no"}, URL, None, ours),
        ({openai: f"{URL}/v1", "OPENAI_API_KEY": KEY}, URL, KEY, openai),
        ({ours: f"{URL}/v1/", "OPENAI_API_KEY": KEY}, URL, KEY, ours),
        ({ours: URL, "OPENAI_API_KEY": "no", "ANY_AGENT_API_KEY": KEY}, URL, KEY, ours),
        ({ours: f"{URL}/behind/v1"}, f"{URL}/behind", None, ours),
        ({ours: "", openai: URL}, URL, None, openai),
    ):
        found = find_service(environ=environ)
        assert (found.url, found.api_key, found.url_from) == (url, key, named_by)
        assert KEY not in repr(found)
    # Arguments come first.
    found = find_service(f"{URL}/v1", KEY, {ours: "http://no", "ANY_AGENT_API_KEY": "no"})
    assert (found.url, found.api_key, found.key_from) == (URL, KEY, "api_key")


def test_an_address_of_no_service_is_refused_without_showing_its_secrets() -> None:
    ours, openai = "ANY_AGENT_URL", "OPENAI_BASE_URL"
    for environ, said in (
        ({}, "url="),
        ({ours: "10.0.0.1:8000"}, "ANY_AGENT_URL is '10.0.0.1:8000'"),
        ({ours: "ftp://x"}, "ANY_AGENT_URL is 'ftp://x'"),
        ({ours: "http://[::1"}, "ANY_AGENT_URL is 'http://[::1'"),
        ({ours: "http://me:secret@host"}, "password"),
        ({ours: f"{URL}?key=secret"}, "? or #"),
        ({openai: f"{URL}/{SESSION_KEY}/v1"}, "one session in its path"),
        ({openai: URL, "OPENAI_API_KEY": SESSION_KEY}, "OPENAI_API_KEY is the key of one session"),
    ):
        with fails_with(ConfigError, said) as refused:
            find_service(environ=environ)
        assert "secret" not in str(refused.value)
        assert SESSION_KEY not in str(refused.value)


def test_a_key_may_end_with_a_line_break_and_holds_none() -> None:
    assert find_service(URL, "sk-tenant.secret\n").api_key == "sk-tenant.secret"
    assert find_service(URL, " \n").api_key is None
    for key in ("sk-tenant secret", "sk-tenant\nsecret", "sk-tenant.secret\u2026"):
        with fails_with(ConfigError, "api_key", "spaces") as refused:
            find_service(URL, key)
        assert "secret" not in str(refused.value)


async def test_an_address_of_this_machine_may_be_that_of_a_service_that_starts() -> None:
    for url, retry_for, seconds in (
        ("http://127.0.0.1:8000", None, 60),
        ("http://localhost:8000", None, 60),
        ("http://[::1]:8000", None, 60),
        ("http://127.0.0.1.example.com", None, 5),
        ("http://10.0.0.7:8000", None, 5),
        ("http://10.0.0.7:8000", 30.0, 30),
        ("file:///run/url", None, 900),
    ):
        async with shared_client(ServiceAddress(url), retry_for=retry_for) as client:
            assert client.first_contact == seconds, url


async def test_whoever_lacks_a_key_is_told_which_variable_takes_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with fails_with(Unauthenticated, "ANY_AGENT_API_KEY", "api_key="):
        async with AgentSession():
            pass
    monkeypatch.setenv("OPENAI_API_KEY", "sk-proj-secret")
    with fails_with(Unauthenticated, "key of OPENAI_API_KEY") as refused:
        async with AgentSession():
            pass
    assert "secret" not in str(refused.value)


async def test_sessions_share_their_loops_connections(serve: Serve) -> None:
    served = await serve()
    service = find_service(served.url, served.tenant_key)
    users = [shared_client(service, retry_for=1.0) for _ in range(2)]
    other = shared_client(find_service(served.url, "other"), retry_for=1.0)
    first = await users[0].__aenter__()
    assert await users[1].__aenter__() is first
    assert await other.__aenter__() is not first
    await users[0].__aexit__()
    assert (await first.run_info()).version == 0
    await users[1].__aexit__()
    async with shared_client(service, retry_for=1.0) as client:
        assert client is not first
    await other.__aexit__()
