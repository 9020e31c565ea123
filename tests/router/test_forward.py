"""What passes through unchanged, and what must not pass."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from any_agent.errors import ReplyLost
from tests.router.conftest import StartLab
from tests.support.proxy import LIMIT, until
from tests.support.router import OK, Lab, Received


@pytest.mark.parametrize(
    "target",
    [
        "/v1/models/org%2Fname",
        "/v1/x?a=1&a=2&empty=&plus=a+b&space=%20&lower=%c3%a9&q=a/b?c",
        "/v1//double/../dots/./x",
        "/v1/x?flag",
        "/v1/%7Etilde;p=1,2@:!$'()*",
    ],
)
async def test_targets_arrive_byte_for_byte(lab: Lab, target: str) -> None:
    wire = await lab.connect()
    await wire.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert "200" in await wire.head()
    assert [r.target for r in lab.ranks[0].received] == [target]


async def test_targets_that_are_no_path_are_refused(lab: Lab) -> None:
    for target in ("http://example.org/v1/models", "*", "example.org:443", "/v1/x#part"):
        wire = await lab.connect()
        await wire.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert " 400 " in await wire.head(), target
    assert not lab.ranks[0].received


async def test_hop_by_hop_headers_stay_on_their_hop(lab: Lab) -> None:
    async def answer(received: Received) -> None:
        await received.answer(
            headers={
                "Connection": "keep-alive, X-Inner",
                "Keep-Alive": "timeout=5",
                "X-Inner": "1",
                "X-Outer": "2",
                "Set-Cookie": "a=1",
            }
        )

    lab.ranks[0].handler = answer
    wire = await lab.connect()
    await wire.send(
        b"POST /v1/x HTTP/1.1\r\nHost: localhost:1\r\nConnection: keep-alive, X-Mine\r\n"
        b"X-Mine: 1\r\nKeep-Alive: 5\r\nProxy-Authorization: p\r\nTE: trailers\r\n"
        b"Upgrade: h2c\r\nX-Other: 2\r\nContent-Length: 2\r\n\r\n{}"
    )
    head = (await wire.head()).lower()
    got = {name.lower(): value for name, value in lab.ranks[0].received[0].headers}
    assert got["x-other"] == "2"
    assert got["host"] == "localhost:1"
    dropped = {"connection", "x-mine", "keep-alive", "proxy-authorization", "te", "upgrade"}
    assert not dropped & set(got)
    assert "x-outer: 2" in head
    assert "x-inner" not in head
    assert "timeout=5" not in head


async def test_only_the_clients_address_is_added(lab: Lab) -> None:
    wire = await lab.connect()
    await wire.send(
        b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
        b"x-any-agent-client: 8.8.8.8\r\n\r\n{}"
    )
    await wire.head()
    received = lab.ranks[0].received[0]
    assert {name.lower() for name, _ in received.headers} == {
        "host",
        "content-length",
        "x-any-agent-client",
    }
    (signed,) = received.values("x-any-agent-client")
    assert lab.signer.client_in(signed) == "127.0.0.1"
    assert lab.signer.client_in(signed.replace("127.0.0.1", "8.8.8.8")) is None


async def test_cookies_of_one_client_are_not_anothers(lab: Lab) -> None:
    async def answer(received: Received) -> None:
        await received.answer(headers={"Set-Cookie": "who=me; Path=/"})

    lab.ranks[0].handler = answer
    first = await lab.connect()
    await first.send(b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert "who=me" in await first.head()
    second = await lab.connect()
    await second.send(b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await second.head()
    assert not lab.ranks[0].received[1].values("cookie")


async def test_what_the_page_guard_reads_arrives_as_it_came(start_lab: StartLab) -> None:
    lab = await start_lab("server.admin_key=operator-secret")
    sent = {"Host": "app.example", "Origin": "https://page.example", "Sec-Fetch-Site": "cross-site"}
    await lab.get("/v1/models", **sent)
    for name, value in sent.items():
        assert lab.ranks[0].received[0].values(name) == [value]


async def test_a_redirect_is_the_clients_to_follow(lab: Lab) -> None:
    async def answer(received: Received) -> None:
        await received.answer(status=307, headers={"Location": f"{lab.ranks[0].url}/elsewhere"})

    lab.ranks[0].handler = answer
    response = await lab.get("/v1/models")
    assert response.status_code == 307
    assert len(lab.ranks[0].received) == 1


async def test_compressed_answers_pass_as_they_are(lab: Lab) -> None:
    packed = gzip.compress(b'{"hello": "world"}')

    async def answer(received: Received) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n"
        await received.send(head.encode() + packed)

    lab.ranks[0].handler = answer
    wire = await lab.connect()
    await wire.send(b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n")
    head = await wire.head()
    assert "gzip" in head
    assert await wire.take(len(packed)) == packed
    assert lab.ranks[0].received[0].values("accept-encoding") == ["gzip"]


async def test_compressed_bodies_pass_as_they_are(lab: Lab) -> None:
    packed = gzip.compress(b'{"hello": "world"}')
    await lab.post("/v1/chat/completions", packed, **{"Content-Encoding": "gzip"})
    assert lab.ranks[0].received[0].body == packed


@pytest.mark.parametrize(("text", "kept"), [("café", "utf-8"), ("caf\xe9", "latin-1")])
async def test_headers_beyond_ascii(lab: Lab, text: str, kept: str) -> None:
    """UTF-8 passes; a byte that is no text is left out, and breaks nothing."""
    line = b"X-Place: %s\r\n" % text.encode(kept)

    async def answer(received: Received) -> None:
        await received.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n%s\r\n" % line)

    lab.ranks[0].handler = answer
    wire = await lab.connect()
    await wire.send(b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % line)
    whole = text.encode().decode("latin-1") if kept == "utf-8" else "caf"
    assert f"X-Place: {whole}\r\n" in await wire.head()
    assert lab.ranks[0].received[0].values("x-place") == [whole]


async def test_a_head_request_has_no_body(lab: Lab) -> None:
    async def answer(received: Received) -> None:
        await received.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")

    lab.ranks[0].handler = answer
    wire = await lab.connect()
    for path in ("/v1/models", "/healthz"):
        await wire.send(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = await wire.head()
        assert "200" in head
        assert "content-length" in head.lower()
    # Had a body followed, this answer would not be the next thing on the connection.
    await wire.send(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await wire.head()).startswith("HTTP/1.1 200")


async def test_a_duplicate_key_is_sent_on_once(lab: Lab) -> None:
    key = lab.key(0)
    wire = await lab.connect()
    line = f"Authorization: Bearer {key}\r\n"
    await wire.send(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{line}{line}\r\n".encode())
    assert "200" in await wire.head()
    assert lab.ranks[0].received[0].values("authorization") == [f"Bearer {key}"]


@pytest.mark.parametrize("empty", ["", "Bearer", "Bearer "])
async def test_an_empty_key_beside_a_key_is_left_out(lab: Lab, empty: str) -> None:
    """It was found by the other one; a rank that reads the first alone would find none."""
    key = f"Bearer {lab.key(0)}"
    wire = await lab.connect()
    lines = f"Authorization: {empty}\r\nAuthorization: {key}\r\n"
    await wire.send(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
    assert "200" in await wire.head()
    assert lab.ranks[0].received[0].values("authorization") == [key]


async def test_two_different_keys_are_refused(lab: Lab) -> None:
    lines = "".join(f"Authorization: Bearer {lab.key(0)}\r\n" for _ in range(2))
    wire = await lab.connect()
    await wire.send(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
    assert " 400 " in await wire.head()
    assert not lab.ranks[0].received


async def test_a_client_that_waits_is_told_to_go_on(lab: Lab) -> None:
    wire = await lab.connect()
    await wire.send(
        b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        b"Content-Length: 2\r\n\r\n"
    )
    assert await wire.head() == "HTTP/1.1 100 Continue\r\n\r\n"
    await wire.send(b"{}")
    assert "200" in await wire.head()
    assert not lab.ranks[0].received[0].values("expect")


async def test_large_bodies_stream_both_ways(lab: Lab) -> None:
    size = 3_000_000
    body = bytes(range(256)) * (size // 256)

    async def echo(received: Received) -> None:
        await received.begin()
        for start in range(0, len(received.body), 100_000):
            await received.chunk(received.body[start : start + 100_000])
        await received.send(b"0\r\n\r\n")

    lab.ranks[0].handler = echo

    async def parts() -> object:
        for start in range(0, len(body), 70_000):
            yield body[start : start + 70_000]

    whole = await lab.post("/v1/x", body)
    assert whole.content == body
    assert lab.ranks[0].received[0].values("content-length") == [str(len(body))]
    chunked = await lab.http.post("/v1/x", content=parts())  # type: ignore[arg-type]
    assert chunked.content == body
    assert lab.ranks[0].received[1].values("transfer-encoding") == ["chunked"]


async def test_each_chunk_leaves_at_once(lab: Lab) -> None:
    """Each one is sent by the rank only after the client has the one before."""
    turn = asyncio.Semaphore(0)

    async def answer(received: Received) -> None:
        await received.begin("content-type: text/event-stream")
        for number in range(20):
            await received.chunk(b"data: %d\n\n" % number)
            await turn.acquire()
        await received.send(b"0\r\n\r\n")

    lab.ranks[0].handler = answer
    seen = []
    async with asyncio.timeout(LIMIT), lab.http.stream("POST", "/v1/x", content=b"{}") as response:
        assert response.headers["content-type"] == "text/event-stream"
        async for part in response.aiter_raw():
            seen.append(part)
            turn.release()
    assert seen == [b"data: %d\n\n" % number for number in range(20)]


async def test_headers_leave_before_the_first_chunk(lab: Lab) -> None:
    go = asyncio.Event()

    async def answer(received: Received) -> None:
        await received.begin()
        await go.wait()
        await received.send(b"0\r\n\r\n")

    lab.ranks[0].handler = answer
    wire = await lab.connect()
    await wire.send(b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert "200" in await wire.head()
    go.set()
    assert await wire.take(5) == b"0\r\n\r\n"


async def test_old_clients_get_streams_without_chunks(lab: Lab) -> None:
    async def answer(received: Received) -> None:
        await received.begin()
        await received.chunk(b"all of it")
        await received.send(b"0\r\n\r\n")

    lab.ranks[0].handler = answer
    wire = await lab.connect()
    await wire.send(b"GET /v1/x HTTP/1.0\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
    head = (await wire.head()).lower()
    assert "chunked" not in head
    assert await wire.rest() == (b"all of it", False)


async def test_connections_to_a_rank_are_kept(lab: Lab) -> None:
    for _ in range(10):
        await lab.post("/v1/x", {})
    assert lab.ranks[0].connections == 1


async def test_no_limit_on_calls_at_once(lab: Lab) -> None:
    """More than the 100 connections that a pool has by default."""
    go = asyncio.Event()

    async def answer(received: Received) -> None:
        await go.wait()
        await received.answer()

    lab.ranks[0].handler = answer
    wires = [await lab.connect() for _ in range(150)]
    for wire in wires:
        await wire.send(b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await until(lambda: len(lab.ranks[0].received) == 150, "150 calls at once")
    go.set()
    for wire in wires:
        assert "200" in await wire.head()


async def test_the_environments_proxy_is_not_used(
    start_lab: StartLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    lab = await start_lab()
    wire = await lab.connect()
    await wire.send(b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert "200" in await wire.head()


async def test_a_rank_may_answer_before_it_has_the_whole_body(lab: Lab) -> None:
    """As when it refuses the request for its headers."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK.replace(b"200 OK", b"401 Unauthorized"))
        await writer.drain()

    lab.ranks[0]._serve = refuse  # type: ignore[method-assign]
    await lab.ranks[0].kill()
    await lab.restart(lab.ranks[0])
    wire = await lab.connect()
    await wire.send(b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
    await wire.send(b"x" * 1000)
    assert " 401 " in await wire.head()


async def test_errors_of_a_rank_pass_as_they_are(lab: Lab) -> None:
    async def answer(received: Received) -> None:
        await received.answer({"error": {"code": "x"}}, status=429, headers={"Retry-After": "7"})

    lab.ranks[0].handler = answer
    response = await lab.post("/v1/chat/completions", {})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.json() == {"error": {"code": "x"}}
    assert ReplyLost.default_code not in response.text


@pytest.mark.parametrize("framing", ["transfer-encoding: chunked", "content-length: 70000"])
async def test_an_error_that_is_passed_on_in_parts_keeps_its_status(lab: Lab, framing: str) -> None:
    async def answer(received: Received) -> None:
        body = b"x" * 70_000
        await received.send(f"HTTP/1.1 503 Unavailable\r\n{framing}\r\n\r\n".encode())
        await received.send(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body)

    chunked = framing.endswith("chunked")
    lab.ranks[0].handler = answer
    response = await lab.post("/v1/chat/completions", {})
    assert response.status_code == 503
    assert response.content == b"x" * 70_000


@pytest.mark.parametrize("path", ["/rl/v1/start_session", "/rl/v1/set_reward", "/rl/v1/pause"])
async def test_compressed_bodies_that_the_router_reads_arrive_decoded(pair: Lab, path: str) -> None:
    plain = b'{"task_id": "a"}'
    await pair.post(path, gzip.compress(plain), **{"Content-Encoding": "gzip"})
    received = [each for rank in pair.ranks for each in rank.received if path in each.target]
    assert received
    for each in received:
        assert each.json["task_id"] == "a"
        assert each.values("content-encoding") == []
        assert each.values("content-length") == [str(len(each.body))]


async def test_the_router_names_the_codings_that_it_reads(pair: Lab) -> None:
    path = "/rl/v1/start_session"
    refused = await pair.post(path, b"{}", **{"Content-Encoding": "br"})
    assert refused.status_code == 415
    assert refused.headers["accept-encoding"] == "gzip, deflate"
    bomb = gzip.compress(b" " * 5_000_000)
    assert (await pair.post(path, bomb, **{"Content-Encoding": "gzip"})).status_code == 413
    cut = gzip.compress(b"{}")[:-1]
    assert (await pair.post(path, cut, **{"Content-Encoding": "gzip"})).status_code == 400
    assert not [each for rank in pair.ranks for each in rank.received if path in each.target]
