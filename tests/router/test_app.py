"""What the router decides before it passes anything on, and what it answers itself."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from any_agent.protocol.conversation_key import rank_tag
from any_agent.protocol.rl import API_HEADER, API_VERSION
from any_agent.rundir.registry import publish
from router import entrance
from router.affinity import home_of
from tests.router.conftest import StartLab
from tests.router.test_affinity import IDS
from tests.support.proxy import until
from tests.support.router import Lab, die, never, refusal, refuses, serving


async def test_keys_and_ids_find_their_rank(pair: Lab) -> None:
    for number, rank in enumerate(pair.ranks):
        key = pair.key(number)
        await pair.post("/v1/chat/completions", {}, key)
        await pair.post("/v1/chat/completions", {}, **{"x-api-key": key})
        await pair.post("/openai/deployments/m/chat/completions", {}, **{"api-key": key})
        await pair.post(f"/{key}/v1/chat/completions", {}, "DUMMY")
        await pair.post("/v1/chat/completions", {}, **{"X-Any-Agent-Session": IDS[number]})
        await pair.post(f"/rl/v1/finalize?session_id={IDS[number]}")
        await pair.post("/rl/v1/set_reward", {"reward": 1, "session_id": IDS[number]})
        await pair.get(f"/rl/v1/sessions/{IDS[number]}")
        await pair.post("/rl/v1/feedback", {"completion_id": f"chatcmpl-{rank_tag(number)}ff"})
        assert len(rank.received) == 9
        assert rank.received[3].target == f"/{key}/v1/chat/completions"
        assert rank.received[6].json == {"reward": 1, "session_id": IDS[number]}


async def test_an_escaped_path_is_routed_as_the_path_that_it_spells(pair: Lab) -> None:
    """The proxies decode a path before they look at it."""
    home = pair.ranks[home_of("g", range(2))]
    for _ in range(3):
        await pair.post("/rl/v1/%73tart_session", {"group_id": "g"})
    assert len(home.received) == 3
    for number, rank in enumerate(pair.ranks):
        rank.received.clear()
        key = pair.key(number).replace("sk-", "sk%2D")
        for _ in range(2):
            await pair.post(f"/{key}/v1/x")
        assert [r.target for r in rank.received] == [f"/{key}/v1/x"] * 2


async def test_a_websocket_is_refused_where_it_would_be_lost(pair: Lab) -> None:
    asks = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    for path in ("/v1/responses", "/openai/v1/responses", f"/{pair.key(1)}/v1/responses"):
        answer = await pair.get(path, **asks)
        assert refusal(answer) == (426, "no_websocket")
    assert not any(rank.received for rank in pair.ranks)
    assert (await pair.get("/v1/models", **asks)).status_code == 200


async def test_bodies_over_the_limit_reach_no_rank(start_lab: StartLab) -> None:
    """Whether they say their size or not, at once or in parts, long or short."""
    lab = await start_lab("server.max_body_bytes=100000")
    for path in ("/v1/x", "/rl/v1/x"):
        for content in (b"x" * 100_001, _parts(3)):
            response = await lab.http.post(path, content=content)
            assert refusal(response) == (413, "payload_too_large")
        for announced, sent in (
            (["Transfer-Encoding: chunked"], b"186a1\r\n" + b"x" * 100_001 + b"\r\n0\r\n\r\n"),
            (["Expect: 100-continue", "Content-Length: 100001"], b""),
        ):
            wire = await lab.raw(f"POST {path}", *announced)
            await wire.send(sent)
            assert " 413 " in await wire.head()
    assert not lab.ranks[0].received
    for content in (b"x" * 100_000, _parts(2)):
        assert (await lab.http.post("/v1/x", content=content)).status_code == 200
    assert len(lab.ranks[0].received) == 2


async def _parts(count: int) -> object:
    for _ in range(count):
        yield b"x" * 40_000


async def test_rl_bodies_that_are_read_have_a_limit_of_their_own(pair: Lab) -> None:
    assert (await pair.post("/rl/v1/set_reward", b"x" * (1 << 20) + b"x")).status_code == 413
    assert (await pair.post("/rl/v1/start_session", b"x" * (1 << 20) + b"x")).status_code == 413


FORGED = {"authorization": "Bearer sk-admin.00000000." + "0" * 48}
AGENTS: dict[str, str] = {}
"""Stands for the key of a session."""
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/rl/v1/start_session", {}),
        ("/rl/v1/start_session", FORGED),
        ("/rl/v1/ack", {}),
        ("/rl/v1/set_reward", {}),
        (CHAT, {}),
        (CHAT, FORGED),
        (CHAT, {"x-any-agent-session": "ses-0-0123456789abcdef"}),
        (f"/ses-0-0123456789abcdef{CHAT}", {}),
        # An agent opens nothing, and acknowledges nothing.
        ("/rl/v1/start_session", AGENTS),
        ("/rl/start_session", AGENTS),
        ("/rl/v1/ack", AGENTS),
    ],
)
@pytest.mark.parametrize("size", [10, 1_000_000])
async def test_nobody_waits_for_the_body_of_a_stranger(
    start_lab: StartLab, path: str, headers: dict[str, str], size: int
) -> None:
    """It was announced and does not come: a rank refuses the request by its head."""
    lab = await start_lab("server.admin_key=operator-secret")
    if headers is AGENTS:
        size = 1_000_000
        headers = {"authorization": f"Bearer {lab.key(0)}"}
    named = {"Content-Length": size, **headers}
    _wire = await lab.raw(f"POST {path}", *(f"{k}: {v}" for k, v in named.items()))
    await until(lambda: lab.ranks[0].connections, "a rank's hearing of it")


@pytest.mark.parametrize(
    ("count", "size", "status"),
    [
        (1, 20_000, 200),
        (2, 20_000, 413),
        # One that is too large by itself is not even read to its end.
        (1, 33_000, 400),
        (100, 100, 200),
        (130, 10, 400),
    ],
)
async def test_headers_over_the_limits_reach_no_rank(
    lab: Lab, count: int, size: int, status: int
) -> None:
    response = await lab.get("/v1/models", **{f"X-{k}": "x" * size for k in range(count)})
    assert response.status_code == status
    if status != 200:
        assert not lab.ranks[0].received


async def test_bytes_that_are_no_http_are_refused_and_no_key_is_logged(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    key = lab.key(0)
    both = "Content-Length: 4\r\nTransfer-Encoding: chunked"
    for line in (
        *(f"GET /{key}\x01/v1/x HTTP/1.1", "\x16\x03\x01", "GET / HTTP/1.1\r\nno colon"),
        # Two framings, by which a second request would be smuggled in.
        f"POST /v1/x HTTP/1.1\r\n{both}",
    ):
        wire = await (await lab.connect()).send(
            f"{line}\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
        )
        head = await wire.head()
        assert " 400 " in head
        assert "Server: any-agent\r\n" in head
        data, _ = await wire.rest()
        assert b"invalid_request" in data
    assert key not in caplog.text and not lab.ranks[0].received


PAGES = [
    {"Host": "evil.example"},
    {"Host": "127.0.0.1.evil.example:80"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


async def test_open_mode_serves_programs_of_this_machine_and_no_web_page(
    pair: Lab, start_lab: StartLab
) -> None:
    for headers in PAGES:
        for path in ("/healthz", "/rl/v1/capacity", "/v1/models"):
            response = await pair.get(path, **headers)
            assert response.status_code == 403, (headers, path)
            assert "server.admin_key" in response.json()["error"]["message"]
    assert not any(rank.received for rank in pair.ranks)
    for headers in ({"Host": "localhost:8000"}, {"Host": "[::1]"}, {"Sec-Fetch-Site": "none"}):
        assert (await pair.get("/healthz", **headers)).status_code == 200
    lab = await start_lab("server.admin_key=operator-secret")
    for headers in PAGES:
        for path in ("/healthz", "/v1/models"):
            assert (await lab.get(path, **headers)).status_code == 200, "with a key"


async def test_health_shows_the_ranks(pair: Lab) -> None:
    assert (await pair.get("/readyz")).json() == {"status": "ready", "ranks": [0, 1]}
    await pair.ranks[0].kill()
    pair.ranks[1].version = 7
    await pair.post("/v1/x", {}, pair.key(1))
    pair.router.ranks.mark_failed(0)
    await until(lambda: pair.router.ranks.entry(1).version == 7, "the entry is read")  # type: ignore[union-attr]
    health = (await pair.get("/healthz")).json()
    assert health["status"] == "ok"
    assert health["ranks"]["0"]["state"] == "away"
    assert health["ranks"]["1"] == {
        "state": "ready",
        "fleet": "serving",
        "version": 7,
        "load": {"open": 0, "waiting": 0, "calls": 0},
        "engine_up": True,
    }
    assert (await pair.get("/readyz")).json()["ranks"] == [1]


async def test_with_litellms_configuration_an_admin_gets_its_health(
    start_lab: StartLab, tmp_path: Path
) -> None:
    path = tmp_path / "litellm.yaml"
    path.write_text("model_list: []")
    lab = await start_lab("server.admin_key=operator-secret", f"litellm.config={path}")
    assert (await lab.get("/health")).status_code == 200 and not lab.ranks[0].received
    await lab.get("/health", Authorization="Bearer operator-secret")
    assert [each.target for each in lab.ranks[0].received] == ["/health"]


@pytest.mark.parametrize("database", [False, True])
async def test_keys_that_may_be_litellms_open_groups_at_their_home(
    start_lab: StartLab, tmp_path: Path, database: bool
) -> None:
    path = tmp_path / "litellm.yaml"
    url = "\ngeneral_settings: {database_url: 'postgresql://127.0.0.1/litellm'}"
    path.write_text(f"model_list: []{url if database else ''}")
    settings = ("server.admin_key=operator-secret", f"litellm.config={path}")
    lab = await start_lab(*settings, ranks=3)
    for k in range(12):
        body = {"group_id": f"g{k}"}
        await lab.post("/rl/v1/start_session", body, "sk-virtual")
    homes = [{home_of(r.json["group_id"], range(3)) for r in rank.received} for rank in lab.ranks]
    assert (homes == [{0}, {1}, {2}]) is database


async def test_ranks_that_are_away_or_stall_are_not_ready(pair: Lab) -> None:
    pair.silent.add(0)
    await until(lambda: pair.router.ranks.stalled(0), "the rank is missed")
    assert (await pair.get("/readyz")).json()["ranks"] == [1]
    pair.silent.clear()
    await until(lambda: not pair.router.ranks.stalled(0), "the rank is heard")
    assert (await pair.get("/readyz")).json()["ranks"] == [0, 1]
    for rank in pair.ranks:
        await rank.kill()
        pair.router.ranks.mark_failed(rank.number)
    assert (await pair.get("/healthz")).status_code == 200
    response = await pair.get("/readyz")
    assert response.status_code == 503
    assert response.headers["retry-after"]


async def test_ranks_without_room_are_not_ready(pair: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {0}
    monkeypatch.setattr(pair.router, "is_full", lambda rank: rank in full)
    assert (await pair.get("/readyz")).json()["ranks"] == [1]
    full.add(1)
    response = await pair.get("/readyz")
    assert refusal(response) == (503, "store_full")
    assert response.headers["retry-after"]


async def test_ranks_without_an_engine_are_not_ready(pair: Lab) -> None:
    for up, ready in ((False, [1]), (True, [0, 1])):
        pair.ranks[0].engine_up = up
        await until(lambda up=up: pair.router.ranks.engine_up(0) is up, "the entry is read")
        assert (await pair.get("/readyz")).json()["ranks"] == ready
        assert (await pair.get("/healthz")).json()["ranks"]["0"]["engine_up"] is up
    for rank in pair.ranks:
        rank.engine_up = False
    await until(lambda: not pair.router.ranks.engine_up(1), "the entry is read")
    response = await pair.get("/readyz")
    assert refusal(response) == (503, "engine_unavailable")
    assert response.headers["retry-after"]


async def test_the_routers_own_answers_name_their_version(pair: Lab) -> None:
    """What no rank has answered is an answer of a service, too."""
    answer = await pair.get("/rl/v1/sessions/ses-7-0123456789abcdef")
    assert (answer.status_code, answer.headers.get_list(API_HEADER)) == (404, [API_VERSION])
    assert API_HEADER not in (await pair.get("/readyz")).headers


async def test_a_stop_ends_requests_that_do_not_end_by_themselves(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrance, "STOP_SECONDS", 0.2)

    lab.ranks[0].handler = never
    async with asyncio.timeout(60), serving(lab.config) as (_, port):
        lab.port = port
        wire = await lab.raw()
        await until(lambda: lab.ranks[0].received, "the call is under way")
    assert (await wire.rest())[0] == b""
    assert lab.ranks[0].left.is_set()
    with pytest.raises(ConnectionRefusedError):
        await lab.connect()


async def test_nothing_that_is_logged_holds_a_key(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = lab.key(0)

    await lab.post(f"/{key}/v1/x", {}, key)
    lab.ranks[0].handler = die
    await lab.post(f"/{key}/v1/x", {}, key)
    await lab.ranks[0].kill()
    publish(lab.registry, lab.ranks[0].entry())
    await lab.restart(lab.ranks[0])
    await lab.post(f"/{key}/v1/x", {}, key)
    ours = [r for r in caplog.records if r.name.split(".")[0] in ("router", "aiohttp", "any_agent")]
    assert all(key not in record.getMessage() for record in ours)


async def test_bodies_that_cannot_be_written_again_are_refused(pair: Lab) -> None:
    """What is changed on its way is written anew, and no writer goes as deep as the reader."""

    pair.handle(refuses("no_capacity", 429))
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    for path, fields in (
        ("/rl/v1/lease", b'"owner": "me"'),
        ("/rl/v1/ack", b'"trained": ["ses-0-0123456789abcdef"]'),
        ("/rl/v1/start_session", b'"wait": 1'),
        ("/rl/start_session", b'"task_id": "t"'),
    ):
        response = await pair.post(path, b'{%s, "metadata": %s}' % (fields, deep))
        assert response.status_code in (400, 429), (path, response.text)
        if response.status_code == 400:
            assert response.json()["error"]["code"] == "too_deep"


@pytest.mark.parametrize("ui", [True, False])
async def test_the_root_page_says_what_runs_here_without_a_key(
    start_lab: StartLab, ui: bool
) -> None:
    lab = await start_lab("server.admin_key=admin-key-1", f"server.ui={str(ui).lower()}")
    answer = await lab.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    url = str(lab.http.base_url).rstrip("/")
    assert f"{url}/v1 " in answer.text
    assert "docs/README.md" in answer.text and (f"{url}/ui" in answer.text) == ui
    # It tells nobody about the run, and asks no rank.
    for key in ("wrong", lab.signer.mint(0)[1]):
        assert (await lab.get("/", key)).status_code == 200
    assert lab.ranks[0].received == []
    assert lab.config.experiment not in answer.text.replace("any-agent", "")
    head = await lab.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))


async def test_a_browser_is_led_to_the_dashboard_where_there_is_one(start_lab: StartLab) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    lab = await start_lab()
    answer = await lab.get("/", **browser)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui")
