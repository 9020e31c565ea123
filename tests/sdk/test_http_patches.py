"""Which requests of unmodified clients join a session, and that its key goes nowhere else."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from typing import Any

import aiohttp
import httpx
import pytest
import requests

from any_agent.client.environment import PLACEHOLDER_KEY
from any_agent.sdk import session_context as ambient
from any_agent.sdk.http_patches import patches
from tests.support.sdk.hops import CLIENTS, KEY, Get, Server, in_session

OTHER = "sk-v1.0.cccccccccccccccccccccccc.dddddddddddddddddddddddddddddddd"
# aiohttp's own authentication, which there still is.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tests.support.sdk.hops")
OURS, OTHERS = f"Bearer {KEY}", f"Bearer {OTHER}"
URL = "http://service:8000"


@pytest.mark.parametrize("get", CLIENTS)
async def test_calls_to_the_service_join_the_session_and_no_others(
    get: Get, service: Server, elsewhere: Server
) -> None:
    """Whatever key the client has of its own; and nobody else hears of the session's."""
    own = {"Authorization": "Bearer sk-proj-mine", "x-api-key": "mine", "api-key": "mine"}
    with in_session(service.url):
        await get(f"{service.url}/v1/models", own)
        await get(f"{elsewhere.url}/v1/models", own)
    await get(f"{service.url}/v1/models", own)
    assert service.keys[0] == OURS
    assert not {"x-api-key", "api-key"} & set(service.seen[0][1])
    assert KEY not in str(elsewhere.seen)
    assert KEY not in str(service.seen[1])


@pytest.mark.parametrize("get", [get for get in CLIENTS if "with_auth" not in get.__name__])
async def test_calls_of_a_client_made_without_arguments_join_and_no_other_providers_do(
    get: Get, service: Server
) -> None:
    """By the URL that names no session, which the service refuses everywhere else."""
    url, path = f"{service.url}/sk-v1.placeholder/v1/models", "/v1/models"
    bare = {"Authorization": f"Bearer {PLACEHOLDER_KEY}"}
    with in_session(service.url):
        await get(url, bare)
        await get(url, {})
        await get(url, {"Authorization": OTHERS})
        await get(url, {"Authorization": "Bearer sk-proj-a-judges"})
    await get(url, bare)
    assert service.keys == [OURS, OURS, OTHERS, "Bearer sk-proj-a-judges", bare["Authorization"]]
    refused = "/sk-v1.placeholder/v1/models"
    assert [path for path, _ in service.seen] == [path, path, path, refused, refused]


@pytest.mark.parametrize("get", CLIENTS)
async def test_a_redirect_takes_no_key_elsewhere(
    get: Get, service: Server, elsewhere: Server
) -> None:
    """Each hop is judged by itself: from the service, back to it, and from an agents' route there
    to one that is none."""
    service.redirects["/v1/models"] = f"{elsewhere.url}/models"
    elsewhere.redirects["/models"] = f"{service.url}/models"
    service.redirects["/models"] = f"{service.url}/rl/v1/sessions"
    with in_session(service.url):
        await get(f"{service.url}/v1/models", {})
    assert [path for path, _ in elsewhere.seen] == ["/models"]
    assert KEY not in str(elsewhere.seen)
    assert service.keys[:2] == [OURS, OURS]
    assert service.seen[2][0] == "/rl/v1/sessions"
    assert KEY not in str(service.seen[2])


def key_for(url: str, *asked: Any) -> str | None:
    """The key that a request gets in a session of the service at this URL."""
    membership = ambient.join(url, KEY)
    try:
        return ambient.key_for(*asked, {})
    finally:
        ambient.leave(membership)


JOINING = """
/v1/chat/completions /chat/completions /v1/responses/resp_1/input_items /v1/messages/count_tokens
/v1/models/gpt-4o /openai/deployments/gpt-4o/chat/completions /v1/deployments/gpt-4o/embeddings
/rl/v1/set_reward /rl/v1/finalize /rl/end_session
"""
OTHERS_PATHS = f"""
/openai/deployments/../../other/chat/completions /openai/files /rl/v1/start_session
/rl/v1/sessions/ses-0-0123456789abcdef /rl/v1/lease /rl/v1/set_reward/x /grant_capacity
/export_trajectories /metrics /v1 / /v1/chat/../../other /v1/chat/%2e%2E/%2e%2e/other
/{KEY}/v1/chat/completions /ses-0-0123456789abcdef/v1/chat/completions
"""


def test_only_agents_routes_of_the_services_own_origin_join() -> None:
    for paths, key in ((JOINING, KEY), (OTHERS_PATHS, None)):
        found = {path: key_for(URL, "http", "service", 8000, path) for path in paths.split()}
        assert found == dict.fromkeys(found, key)
    models = "/v1/models"
    for url, asked, joins in (
        ("https://service", ("https", "service", None, models), True),
        ("https://service", ("https", "service", 443, models), True),
        ("https://service", ("http", "service", 443, models), False),
        ("https://service", ("https", "service", 8443, models), False),
        ("https://service", ("https", "service.example.org", 443, models), False),
        ("https://Service/base", ("https", "service", 443, "/base/v1/models"), True),
        ("https://service/base", ("https", "service", 443, models), False),
        ("https://service/base", ("https", "service", 443, "/based/v1/models"), False),
        ("http://[::1]:8000", ("http", "::1", 8000, models), True),
        ("http://bücher.example", ("http", "xn--bcher-kva.example", 80, models), True),
    ):
        assert key_for(url, *asked) == (KEY if joins else None), (url, asked)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": OTHERS},
        {"authorization": f"bearer  {OTHER}"},
        {"x-api-key": OTHER},
        {"api-key": OTHER},
        {"X-Any-Agent-Session": "ses-0-0123456789abcdef"},
    ],
)
@pytest.mark.parametrize("get", [CLIENTS[0], CLIENTS[2], CLIENTS[5], CLIENTS[7]])
async def test_a_request_that_names_a_session_is_left_alone(
    get: Get, headers: dict[str, str], service: Server
) -> None:
    with in_session(service.url):
        await get(f"{service.url}/v1/models", headers)
    name, value = next(iter(headers.items()))
    assert service.seen[0][1][name.lower()] == value
    assert KEY not in str(service.seen)


async def test_requests_keep_no_key(service: Server) -> None:
    """An object that is sent again, in another session or elsewhere, has nothing of this one."""
    url = f"{service.url}/v1/models"
    async with httpx.AsyncClient() as http:
        request = http.build_request("GET", url)
        for key in (KEY, OTHER):
            with in_session(service.url, key):
                await http.send(request)
        assert "authorization" not in request.headers
    prepared = requests.Request("GET", url).prepare()
    with in_session(service.url), requests.Session() as session:
        await asyncio.to_thread(session.send, prepared)
    assert "authorization" not in prepared.headers
    assert service.keys == [OURS, OTHERS, OURS]


async def test_no_proxy_is_told_the_key_on_the_way_to_https() -> None:
    """aiohttp asks it for the connection by a request that has the service's URL."""
    heads: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = "https://service.example:8443/v1/models"
        with in_session("https://service.example:8443"):
            async with aiohttp.ClientSession() as http:
                with pytest.raises(aiohttp.ClientHttpProxyError):
                    await http.get(url, proxy=f"http://127.0.0.1:{port}")
    assert heads[0].startswith(b"CONNECT service.example:8443 ")
    assert KEY.encode() not in heads[0]


async def test_responses_and_errors_show_no_key(service: Server) -> None:
    """Reports of errors show headers, and who tries again may send a response's request."""
    url, nowhere = f"{service.url}/v1/models", "http://127.0.0.1:9/v1/models"
    own = {"Authorization": "Bearer mine", "X-Api-Key": "mine"}
    shown: list[Any] = []
    with in_session(service.url):
        async with httpx.AsyncClient(headers=own) as http:
            shown.append((await http.get(url)).request.headers)
        with httpx.Client(headers=own) as blocking:
            shown.append((await asyncio.to_thread(blocking.get, url)).request.headers)
        shown.append((await asyncio.to_thread(requests.get, url, headers=own)).request.headers)
        async with aiohttp.ClientSession(headers=own) as session, session.get(url) as response:
            shown.append(response.request_info.headers)
    assert service.keys == [OURS] * 4
    with in_session(nowhere.removesuffix("/v1/models")):
        async with httpx.AsyncClient(headers=own) as http:
            with pytest.raises(httpx.ConnectError) as failed:
                await http.get(nowhere)
        shown.append(failed.value.request.headers)
        with pytest.raises(requests.ConnectionError) as refused:
            await asyncio.to_thread(requests.get, nowhere, headers=own)
        assert refused.value.request is not None
        shown.append(refused.value.request.headers)
    for headers in shown:
        assert (headers["authorization"], headers["x-api-key"]) == ("Bearer mine", "mine")


async def test_only_calls_within_a_sessions_context_join_it(service: Server) -> None:
    """Tasks, and threads that copy the context, are in; others, begun before or after, are not."""

    async def ask(name: str) -> None:
        await CLIENTS[0](f"{service.url}/models/{name}", {})

    def blocking(name: str) -> None:
        requests.get(f"{service.url}/models/{name}", timeout=10)

    begun, go = asyncio.Event(), asyncio.Event()

    async def ask_later() -> None:
        begun.set()
        await go.wait()
        await ask("task-before")

    before = asyncio.create_task(ask_later())
    await begun.wait()
    with in_session(service.url):
        go.set()
        await before
        await asyncio.create_task(ask("task-in"))
        await asyncio.to_thread(blocking, "thread-in")
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, context.run, blocking, "executor-in")
        await loop.run_in_executor(None, blocking, "executor-out")
        thread = threading.Thread(target=blocking, args=("thread-out",))
        thread.start()
        await asyncio.to_thread(thread.join)
    keys = {path.rpartition("/")[2]: head.get("authorization") for path, head in service.seen}
    assert keys == {
        "task-before": None,
        "task-in": OURS,
        "thread-in": OURS,
        "executor-in": OURS,
        "executor-out": None,
        "thread-out": None,
    }


async def test_the_innermost_session_has_the_calls(service: Server) -> None:
    url = f"{service.url}/v1/models"
    with in_session(service.url, OTHER):
        await CLIENTS[0](url, {})
        with in_session(service.url):
            await CLIENTS[0](url, {})
        await CLIENTS[0](url, {})
    assert service.keys == [OTHERS, OURS, OTHERS]


def test_nobody_comes_back_to_a_session_that_was_left() -> None:
    """Neither to one that was left first, nor to one that was left in another context."""

    def key() -> str | None:
        return ambient.key_for("http", "service", 80, "/v1/models", {})

    first = ambient.join("http://service", KEY)
    second = ambient.join("http://service", OTHER)
    ambient.leave(first)
    assert key() == OTHER
    ambient.leave(second)
    assert key() is None
    kept = ambient.join("http://service", KEY)
    contextvars.Context().run(ambient.leave, kept)
    inner = ambient.join("http://service", OTHER)
    assert inner.outer is None, "nor do they pile up"
    ambient.leave(inner)
    assert key() is None


PLACES: list[tuple[Any, str]] = [
    (httpx.Client, "_send_single_request"),
    (httpx.AsyncClient, "_send_single_request"),
    (aiohttp.ClientRequest, "send"),
    (requests.adapters.HTTPAdapter, "send"),
]


def now() -> list[Any]:
    return [vars(owner)[name] for owner, name in PLACES]


def test_the_last_session_takes_the_patches_off() -> None:
    originals = now()
    patches.acquire()
    patched = now()
    patches.acquire()
    assert now() == patched
    patches.release()
    assert now() == patched
    patches.release()
    assert now() == originals
    assert not set(map(id, originals)) & set(map(id, patched))


async def test_somebody_elses_patch_stays(service: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below it ours has no effect when no session is open, and the next session works again."""
    seen: list[str] = []
    with in_session(service.url):
        ours = httpx.AsyncClient._send_single_request

        async def theirs(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
            seen.append(request.url.path)
            return await ours(client, request)

        monkeypatch.setattr(httpx.AsyncClient, "_send_single_request", theirs)
    assert httpx.AsyncClient._send_single_request is theirs
    get = CLIENTS[2]
    await get(f"{service.url}/v1/models", {})
    with in_session(service.url, OTHER):
        await get(f"{service.url}/v1/models", {})
    await get(f"{service.url}/v1/models", {})
    assert service.keys == [None, OTHERS, None]
    assert len(seen) == 3


LATE = """
import sys
from any_agent.sdk.http_patches import patches
assert not {"aiohttp", "requests", "httpx2", "openai"} & set(sys.modules)
patches.acquire()
import aiohttp, requests, httpx2
owners = [aiohttp.ClientRequest, requests.adapters.HTTPAdapter]
clients = [httpx2.Client, httpx2.AsyncClient]
def ours():
    methods = [owner.send for owner in owners] + [one._send_single_request for one in clients]
    return [hasattr(method, "__wrapped__") for method in methods]
assert ours() == [True] * 4, ours()
patches.release()
assert ours() == [False] * 4, ours()
assert not any("any_agent" in type(finder).__module__ for finder in sys.meta_path)
"""


@pytest.mark.service
def test_clients_that_are_imported_later_are_found() -> None:
    subprocess.run([sys.executable, "-c", LATE], check=True, timeout=60)
