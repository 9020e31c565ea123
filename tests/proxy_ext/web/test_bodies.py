"""Bodies that are deep or long: refused early, or read without stopping the others."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from any_agent.completions import json_body as bodies
from any_agent.completions import prepare as begin
from any_agent.completions.call_types import Prepared
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Start

CHAT = "/v1/chat/completions"


async def test_deeply_nested_bodies_are_refused(proxy: Proxy) -> None:
    key = (await proxy.open())["api_key"]
    nests: tuple[Callable[[Any], Any], ...] = (lambda deep: [deep], lambda deep: {"a": deep})
    for nest, (levels, status) in itertools.product(nests, ((60, 200), (65, 400), (200, 400))):
        deep: Any = "x"
        for _ in range(levels - 2):  # the body itself is the first, metadata the second
            deep = nest(deep)
        response = await proxy.call(key, max_tokens=2, metadata={"a": deep})
        assert response.status_code == status, (levels, response.text)
        if status == 400:
            assert response.json()["error"]["code"] == "too_deep"


async def test_bodies_are_read_strictly(proxy: Proxy) -> None:
    session, wrong = await proxy.open(), []
    bodies = [
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[]", "invalid_request"),
        (b"5", "invalid_request"),
        (b"[" * 1000 + b"]" * 1000, "too_deep"),
        (b'{"metadata": ' + b'{"a": ' * 100 + b"1" + b"}" * 100 + b"}", "too_deep"),
        (b'{"metadata": ' + b'{"a": ' * 5000 + b"1" + b"}" * 5000 + b"}", "too_deep"),
        (b'{"ttl": NaN}', "invalid_json"),
        (b'{"ttl": 1e400}', "invalid_json"),
        (b'{"ttl": -Infinity}', "invalid_json"),
        (b'{"ttl": %s}' % (b"9" * 5000), "invalid_json"),
        (b'{"metadata": {"a": "\\ud800"}}', "invalid_json"),
        (b'{"metadata": {"a": "\xff"}}', "invalid_json"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
    ]
    of_rl = [
        (b'{"metadata": {"a": 1%s}}' % (b"0" * 40), "integer_too_large"),
        # An error does not grow with its cause.
        (b'{"%s": 1}' % (b"x" * 100_000), "invalid_request"),
    ]
    for path, key, rows in (
        ("/rl/v1/start_session", None, [*bodies, *of_rl]),
        ("/rl/v1/set_reward", session["api_key"], [*bodies, *of_rl, (b"", "invalid_request")]),
        (CHAT, session["api_key"], [*bodies, (b"", "invalid_json")]),
    ):
        for body, code in rows:
            response = await proxy.post(path, body, key)
            found = response.status_code, response.json()["error"]["code"]
            if found != (400, code) or len(response.content) > 1000:
                wrong.append((path, body[:40], response.text[:1000]))
    assert wrong == []
    assert len(proxy.service.sessions.live) == 1
    assert await proxy.recorded(session["session_id"]) == []


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_rendered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start("engine.context_length=64", admit=1)
    key = (await proxy.open())["api_key"]

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(proxy.service.completer.chat, "render", never)
    for stream in (False, True):
        long = [{"role": "user", "content": "w " * 50_000}]
        refusal(await proxy.call(key, long, stream=stream), 400, "context_length_exceeded", "")


async def test_a_long_body_does_not_stop_the_others(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await proxy.open()
    completer = proxy.service.completer
    prepare, begun, go = completer.prepare, threading.Event(), threading.Event()
    told: list[bool] = []

    def slow(*args: Any) -> Prepared:
        begun.set()
        told.append(go.wait(60))
        return prepare(*args)

    monkeypatch.setattr(completer, "prepare", slow)
    monkeypatch.setattr(begin, "LONG_TEXT", 5)
    body = {"messages": HELLO, "max_tokens": 2}
    call = asyncio.create_task(proxy.post(CHAT, body, session["api_key"]))
    await until(begun.is_set)
    assert (await proxy.http.get("/healthz")).status_code == 200
    go.set()
    assert (await call).status_code == 200
    assert told == [True]
    assert len(await proxy.recorded(session["session_id"])) == 1


async def test_more_values_than_can_be_read_at_once_are_refused(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_VALUES", 2000)
    key = (await proxy.open())["api_key"]
    ids = b'{"prompt": [' + b"20," * 1000 + b"20]}"
    assert (await proxy.post("/v1/completions", ids, key)).status_code == 200
    response = await proxy.post("/v1/completions", b"[" + b"[]," * 1500 + b"[]]", key)
    refusal(response, 413, "too_many_values", "2000 values")
    padded = b'{"prompt": "a", "max_tokens": 2' + b" " * 5000 + b"}"
    assert (await proxy.post("/v1/completions", padded, key)).status_code == 200


async def test_blanks_around_the_length_are_legal(proxy: Proxy) -> None:
    key = (await proxy.open())["api_key"]
    body = b'{"reward": 1}'
    host, port = proxy.url.removeprefix("http://").split(":")
    for length in (b"%d", b"  %d", b"%d  ", b" \t%d \t "):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /rl/v1/set_reward HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n"
            b"Connection: close\r\nContent-Length:%s\r\n\r\n%s"
            % (host.encode(), key.encode(), length % len(body), body)
        )
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        # The body was read: there is no call yet that the reward could belong to.
        assert b" 422 " in answer and b"no_interactions" in answer, answer


async def test_long_paths_are_refused(proxy: Proxy) -> None:
    before = (await proxy.http.get("/rl/v1/run")).json()
    long = "x" * 1_000_000
    for method, path, body, field in (
        ("PUT", "/rl/v1/run", {"state": "training", "checkpoint": long}, "checkpoint"),
        ("POST", "/rl/v1/version", {"version": 1, "path": long, "step": 1}, "path"),
    ):
        response = await proxy.http.request(method, path, json=body)
        refusal(response, 400, "invalid_request", "4096 characters")
        assert response.json()["error"]["param"] == field
        assert len(response.content) < 1000
    assert (await proxy.http.get("/rl/v1/run")).json() == before


async def test_compressed_bodies_are_read(proxy: Proxy) -> None:
    for coding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        session = await proxy.open()
        key, headers = session["api_key"], {"content-encoding": coding}
        body = pack(json.dumps({"messages": HELLO, "max_tokens": 2}).encode())
        assert (await proxy.post(CHAT, body, key, **headers)).status_code == 200
        rewarded = await proxy.post("/rl/v1/set_reward", pack(b'{"reward": 1}'), key, **headers)
        assert rewarded.status_code == 200, rewarded.text
        assert len(await proxy.recorded(session["session_id"])) == 1


async def test_unsupported_content_codings_are_refused_by_name(proxy: Proxy) -> None:
    key = (await proxy.open())["api_key"]
    for path in (CHAT, "/v1/messages", "/rl/v1/set_reward"):
        for body, coding, status, code, taken in (
            (b"(\xb5/\xfd", "zstd", 415, "unsupported_encoding", "gzip, deflate"),
            (b"{}", "gzip", 400, "invalid_encoding", None),
        ):
            response = await proxy.post(path, body, key, **{"content-encoding": coding})
            assert response.status_code == status, response.text
            assert response.json()["error"]["code"] == code
            assert response.headers.get("accept-encoding") == taken


async def test_the_body_limit_is_of_the_decoded_size(start: Start) -> None:
    proxy = await start("server.max_body_bytes=8192", admit=1)
    key = (await proxy.open())["api_key"]
    for size, status in ((4000, 200), (9000, 413), (5_000_000, 413)):
        text = json.dumps({"messages": HELLO, "max_tokens": 2}).encode() + b" " * size
        headers = {"content-encoding": "gzip"}
        response = await proxy.post(CHAT, gzip.compress(text), key, **headers)
        assert response.status_code == status, response.text
