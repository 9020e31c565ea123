"""What passes through unchanged, and what must not pass."""

from __future__ import annotations

import asyncio
import gzip

from any_agent.rundir.registry import publish
from tests.router.conftest import StartLab
from tests.support.proxy import LIMIT, until
from tests.support.router import END, OK, Lab, Received, once_set, says, sends


async def test_targets_arrive_byte_for_byte(lab: Lab) -> None:
    targets = [
        "/v1/models/org%2Fname",
        "/v1/x?a=1&a=2&empty=&plus=a+b&space=%20&lower=%c3%a9&q=a/b?c",
        "/v1//double/../dots/./x",
        "/v1/x?flag",
        "/v1/%7Etilde;p=1,2@:!$'()*",
    ]
    for target in targets:
        assert "200" in await (await lab.raw(f"GET {target}")).head()
    assert [r.target for r in lab.ranks[0].received] == targets


async def test_targets_that_are_no_path_are_refused(lab: Lab) -> None:
    for target in ("http://example.org/v1/models", "*", "example.org:443", "/v1/x#part"):
        assert " 400 " in await (await lab.raw(f"GET {target}")).head(), target
    assert not lab.ranks[0].received


async def test_hop_by_hop_headers_stay_on_their_hop(lab: Lab) -> None:
    inner = b"connection: keep-alive, X-Inner\r\nkeep-alive: timeout=5\r\nx-inner: 1\r\n"
    lab.ranks[0].handler = sends(
        b"HTTP/1.1 200 OK\r\n%bx-outer: 2\r\ncontent-length: 2\r\n\r\n{}" % inner
    )
    lines = ["Connection: keep-alive, X-Mine", "X-Mine: 1", "Keep-Alive: 5", "TE: trailers"]
    lines += ["Proxy-Authorization: p", "connection: x-two , Content-Length", "X-Two: 2"]
    lines += ["Upgrade: h2c", "X-Other: 2", "X-Other: 3"]
    wire = await lab.raw("POST /v1/x", *lines, body=b"{}")
    head = (await wire.head()).lower()
    got = sorted((name.lower(), value) for name, value in lab.ranks[0].received[0].headers)
    kept = [("content-length", "2"), ("host", "localhost"), ("x-other", "2"), ("x-other", "3")]
    assert [line for line in got if line[0] != "x-any-agent-client"] == kept
    assert "x-outer: 2" in head
    assert "x-inner" not in head and "timeout=5" not in head


async def test_only_the_clients_address_is_added(lab: Lab) -> None:
    wire = await lab.raw("POST /v1/x", "x-any-agent-client: 8.8.8.8", body=b"{}")
    await wire.head()
    received = lab.ranks[0].received[0]
    names = {name.lower() for name, _ in received.headers}
    assert names == {"host", "content-length", "x-any-agent-client"}
    (signed,) = received.values("x-any-agent-client")
    assert lab.signer.client_in(signed) == "127.0.0.1"
    assert lab.signer.client_in(signed.replace("127.0.0.1", "8.8.8.8")) is None


async def test_what_the_page_guard_reads_arrives_as_it_came(start_lab: StartLab) -> None:
    lab = await start_lab("server.admin_key=operator-secret")
    sent = {"Host": "app.example", "Origin": "https://page.example", "Sec-Fetch-Site": "cross-site"}
    await lab.get("/v1/models", **sent)
    for name, value in sent.items():
        assert lab.ranks[0].received[0].values(name) == [value]


async def test_what_a_rank_answers_passes_as_it_is(lab: Lab) -> None:
    """Its errors, and redirects, which are the client's to follow."""
    where = {"Location": f"{lab.ranks[0].url}/elsewhere"}
    for status, headers in ((429, {"Retry-After": "7"}), (307, where)):
        lab.handle(says({"error": {"code": "x"}}, status=status, headers=headers))
        response = await lab.post("/v1/chat/completions", {})
        assert (response.status_code, response.json()) == (status, {"error": {"code": "x"}})
        assert headers.items() <= {k.title(): v for k, v in response.headers.items()}.items()
    assert len(lab.ranks[0].received) == 2


async def test_compressed_bodies_pass_as_they_are(lab: Lab) -> None:
    packed = gzip.compress(b'{"hello": "world"}')
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    lab.ranks[0].handler = sends(head % len(packed) + packed)
    wire = await lab.raw("GET /v1/x", "Accept-Encoding: gzip")
    assert "gzip" in await wire.head()
    assert await wire.take(len(packed)) == packed
    assert lab.ranks[0].received[0].values("accept-encoding") == ["gzip"]
    await lab.post("/v1/chat/completions", packed, **{"Content-Encoding": "gzip"})
    assert lab.ranks[0].received[1].body == packed


async def test_headers_in_utf8_pass_and_bytes_that_are_no_text_are_left_out(lab: Lab) -> None:
    for text, whole in ((b"caf\xc3\xa9", "caf\xc3\xa9"), (b"caf\xe9", "caf")):
        line = b"X-Place: %s\r\n" % text
        lab.ranks[0].handler = sends(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n%s\r\n" % line)
        wire = await (await lab.connect()).send(
            b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % line
        )
        assert f"X-Place: {whole}\r\n" in await wire.head()
        assert lab.ranks[0].received[-1].values("x-place") == [whole]


async def test_a_head_request_has_no_body(lab: Lab) -> None:
    lab.ranks[0].handler = sends(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
    wire = await lab.connect()
    for path in ("/v1/models", "/healthz"):
        await wire.send(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = await wire.head()
        assert "200" in head
        assert "content-length" in head.lower()
    # Had a body followed, this answer would not be the next thing on the connection.
    await wire.send(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await wire.head()).startswith("HTTP/1.1 200")


async def test_one_key_is_sent_on_once_and_two_are_refused(lab: Lab) -> None:
    """Beside an empty one, too: a rank that reads the first alone would find none."""
    key, other = (f"Bearer {lab.key(0)}" for _ in range(2))
    for first in (key, "", "Bearer", "Bearer "):
        wire = await lab.raw("GET /v1/x", f"Authorization: {first}", f"Authorization: {key}")
        assert "200" in await wire.head()
        assert lab.ranks[0].received.pop().values("authorization") == [key]
    wire = await lab.raw("GET /v1/x", f"Authorization: {key}", f"Authorization: {other}")
    assert " 400 " in await wire.head()
    assert not lab.ranks[0].received


async def test_a_client_that_waits_is_told_to_go_on(lab: Lab) -> None:
    wire = await lab.raw("POST /v1/x", "Expect: 100-continue", "Content-Length: 2")
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
        await received.send(END)

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
        await received.send(END)

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
        await received.send(END)

    lab.ranks[0].handler = answer
    wire = await lab.raw()
    assert "200" in await wire.head()
    go.set()
    assert await wire.take(5) == END


async def test_old_clients_get_streams_without_chunks(lab: Lab) -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    lab.ranks[0].handler = sends(chunked + b"9\r\nall of it\r\n" + END)
    wire = await lab.raw("GET /v1/x", "Connection: keep-alive", version="1.0")
    assert "chunked" not in (await wire.head()).lower()
    assert await wire.rest() == (b"all of it", False)


async def test_calls_at_once_have_no_limit(lab: Lab) -> None:
    """More than the 100 connections that a pool has by default."""
    go = asyncio.Event()

    lab.ranks[0].handler = once_set(go)
    wires = [await lab.raw() for _ in range(150)]
    await until(lambda: len(lab.ranks[0].received) == 150, "150 calls at once")
    go.set()
    for wire in wires:
        assert "200" in await wire.head()
    for _ in range(10):
        await lab.post("/v1/x", {})
    assert lab.ranks[0].connections == 150, "connections are kept"


async def test_a_rank_may_answer_before_it_has_the_whole_body(lab: Lab) -> None:
    """As when it refuses the request for its headers."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK.replace(b"200 OK", b"401 Unauthorized"))
        await writer.drain()

    rank = lab.ranks[0]
    await rank.kill()
    async with await asyncio.start_server(refuse, "127.0.0.1", rank.port):
        publish(lab.registry, rank.entry())
        wire = await lab.raw("POST /v1/x", "Content-Length: 1000000")
        await wire.send(b"x" * 1000)
        assert " 401 " in await wire.head()


async def test_an_error_that_is_passed_on_in_parts_keeps_its_status(lab: Lab) -> None:
    body = b"x" * 70_000
    for framing, sent in (
        (b"transfer-encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)),
        (b"content-length: 70000", body),
    ):
        lab.ranks[0].handler = sends(b"HTTP/1.1 503 Unavailable\r\n%b\r\n\r\n%b" % (framing, sent))
        response = await lab.post("/v1/chat/completions", {})
        assert (response.status_code, response.content) == (503, body)


async def test_compressed_bodies_that_the_router_reads_arrive_decoded(pair: Lab) -> None:
    packed, gzipped = gzip.compress(b'{"task_id": "a"}'), {"Content-Encoding": "gzip"}
    for path in ("/rl/v1/start_session", "/rl/v1/set_reward", "/rl/v1/pause"):
        await pair.post(path, packed, **gzipped)
        received = [each for rank in pair.ranks for each in rank.received if path in each.target]
        assert received
        for each in received:
            assert each.json["task_id"] == "a"
            assert each.values("content-encoding") == []
            assert each.values("content-length") == [str(len(each.body))]
    before = [len(rank.received) for rank in pair.ranks]
    path = "/rl/v1/start_session"
    refused = await pair.post(path, b"{}", **{"Content-Encoding": "br"})
    assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "gzip, deflate")
    bomb, cut = gzip.compress(b" " * 5_000_000), gzip.compress(b"{}")[:-1]
    assert (await pair.post(path, bomb, **gzipped)).status_code == 413
    assert (await pair.post(path, cut, **gzipped)).status_code == 400
    assert [len(rank.received) for rank in pair.ranks] == before
