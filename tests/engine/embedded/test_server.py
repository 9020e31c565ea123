"""The embedded engine over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from any_agent.engine.embedded import server, weight_updates
from any_agent.engine.embedded.__main__ import main
from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.model_loader import LoadedModel
from any_agent.runtime import open_files
from any_agent.runtime.ports import reserve
from tests.support.engine.embedded import LIMIT, Gate, Serve, wrapped
from tests.support.engine.sglang_contract import (
    SamplingContract,
    body,
    call,
    check_answer,
    events,
)
from tests.support.waiting import until


@pytest.fixture
async def url(engine: EmbeddedEngine, serve: Serve) -> str:
    return await serve(engine)


class TestContract(SamplingContract):
    @pytest.fixture
    async def url(self, own_engine: EmbeddedEngine, serve: Serve) -> AsyncIterator[str]:
        yield await serve(own_engine)


@pytest.mark.service
class TestIncremental(SamplingContract):
    @pytest.fixture
    async def url(self, own_engine: EmbeddedEngine, serve: Serve) -> AsyncIterator[str]:
        yield await serve(own_engine, incremental=True)


async def test_a_request_from_a_web_page_is_refused(url: str) -> None:
    async with aiohttp.ClientSession(url) as http:
        for headers in ({"Origin": "http://127.0.0.1:3000"}, {"Sec-Fetch-Site": "none"}):
            for method, path in (("GET", "/health"), ("POST", "/pause_generation")):
                async with http.request(method, path, headers=headers) as response:
                    assert response.status == 403, (path, headers)
        async with http.get("/health") as response:
            assert response.status == 200


async def test_a_stream_never_shows_what_a_stop_string_cuts(url: str) -> None:
    _, free = await call(url, "/generate", body(temperature=0, max_new_tokens=40))
    at = next(i for i in range(12, 60) if "\ufffd" not in free["text"][i : i + 5])
    stop = free["text"][at : at + 5]
    stopped = body(temperature=0, max_new_tokens=40, stop=[stop])
    final = [e async for e in events(url, stopped)]
    assert final[-1]["meta_info"]["finish_reason"]["matched"] == stop
    assert all(final[-1]["text"].startswith(e["text"]) for e in final)
    untrimmed = body(temperature=0, max_new_tokens=40, stop=[stop], no_stop_trim=True)
    _, answer = await call(url, "/generate", untrimmed)
    assert answer["text"].startswith(final[-1]["text"] + stop)


BAD: dict[str, list[Any]] = {
    "input_ids": [None, [], [[5], [6]], [380], [-1], [5, "6"], [5] * 2048],
    "top_logprobs_num": [101, -1],
    "text": ["hello"],
    "lora_path": ["x"],
    "rid": [7],
    "stream": [1],
    "sampling_params": [
        *([], {"n": 2}, {"min_p": "0.1"}, {"ebnf": "a"}, {"regex": 1}, {"json_schema": {}}),
        *({"temperature": "1"}, {"temperature": True}, {"max_new_tokens": 1.5}, {"stop": [1]}),
        *({"stop_token_ids": ["a"]}, {"logit_bias": {"a": 1}}, {"logit_bias": {"1": "1"}}),
        {"logit_bias": {"1": 1, "01": 1}},
    ],
}
BAD_BODIES: list[tuple[str, bytes, int]] = [
    ("/generate", b"{", 400),
    ("/generate", b"[]", 400),
    ("/generate", b"", 400),
    ("/generate", b"x" * (33 * 2**20), 413),
    ("/pause_generation", b'{"mode": "retract"}', 400),
    ("/abort_request", b"{}", 400),
    ("/update_weights_from_disk", b"{}", 400),
    ("/update_weights_from_disk", b'{"model_path": "x", "weight_version": []}', 400),
    ("/nothing", b"{}", 404),
]


async def test_bad_bodies_are_refused(engine: EmbeddedEngine, url: str) -> None:
    cases = [(name, value) for name, values in BAD.items() for value in values]
    told = [(await call(url, "/generate", body() | {name: value}))[0] for name, value in cases]
    assert not [case for case, status in zip(cases, told, strict=True) if status != 400]
    answers = [(await call(url, path, raw))[0] for path, raw, _ in BAD_BODIES]
    assert answers == [status for *_, status in BAD_BODIES]
    assert engine.loop.steps == 0


async def raw(url: str, sent: bytes, end: bytes = b"}}") -> bytes:
    """Send it on a connection of its own; return the answer up to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(b"%s\r\nHost: localhost\r\n\r\n" % sent)
    async with asyncio.timeout(LIMIT):
        got = await reader.readuntil(end)
    writer.close()
    return got


async def test_slow_bodies_and_malformed_requests_are_refused_without_log_lines(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "BODY_TIMEOUT", 0.1)
    monkeypatch.setattr(weight_updates, "BODY_TIMEOUT", 0.1)
    for path in (b"/generate", b"/pause_generation", b"/update_weights_from_tensor"):
        slow = b"POST %s HTTP/1.1\r\nContent-Length: 9" % path
        assert await raw(url, slow, b"time limit (0.1 s)")
    caplog.clear()
    assert b" 400 " in (await raw(url, b"\x16\x03\x01"))[:20]
    assert not caplog.records, "a program without the key can fill the log"


async def test_connections_above_the_bound_are_for_health(
    engine: EmbeddedEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "connections_for_descriptors", lambda: 1)
    url = await serve(engine)
    async with aiohttp.ClientSession(url) as http:
        for _ in range(2):
            async with http.get("/model_info") as answer:
                assert answer.status == 200
            assert b"too_many_connections" in await raw(url, b"GET /model_info HTTP/1.1")
            assert b" 200 " in await raw(url, b"GET /health HTTP/1.1", b"\r\n\r\n")


async def test_neutral_parameters_are_accepted(url: str) -> None:
    neutral = {
        "min_p": 0.0, "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
        "n": 1, "regex": None, "skip_special_tokens": False, "top_k": -1, "stop": None,
        "spaces_between_special_tokens": True,
    }  # fmt: skip
    more = {
        "cache_salt": "a", "extra_key": "b", "logprob_start_len": -1, "text": None,
        "return_text_in_logprobs": False, "lora_path": None,
    }  # fmt: skip
    status, answer = await call(url, "/generate", body(**neutral) | more)
    assert status == 200
    check_answer(answer, 12)


async def test_a_full_queue_and_a_repeated_request_id_are_refused(
    loaded: LoadedModel, serve: Serve
) -> None:
    options = EngineOptions(max_running_requests=1, max_queued_requests=1)
    async with EmbeddedEngine(loaded, options) as engine:
        url = await serve(engine)
        stream = events(url, body(max_new_tokens=2000) | {"rid": "a"})
        await anext(stream)
        await engine.pause("in_place")
        assert (await call(url, "/generate", body() | {"rid": "a"}))[0] == 400
        queued = asyncio.create_task(call(url, "/generate", body()))
        await until(lambda: engine.loop.load == (1, 1))
        assert (await call(url, "/generate", body()))[0] == 503
        await call(url, "/abort_request", {"abort_all": True})
        assert (await queued)[1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_client_that_leaves_ends_its_request(
    loaded: LoadedModel, serve: Serve, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    async with wrapped(loaded, gate.around) as engine:
        url = await serve(engine)
        aborted = asyncio.Event()
        abort = engine.abort

        def spy(*args: Any) -> Any:
            aborted.set()
            return abort(*args)

        monkeypatch.setattr(engine, "abort", spy)
        async with aiohttp.ClientSession() as session:
            ask = session.post(
                url + "/generate", json=body(max_new_tokens=2000) | {"stream": stream}
            )
            task = asyncio.ensure_future(ask)
            await asyncio.to_thread(gate.wait_for_step)
            if stream:
                response = await task
                gate.let(1)
                await response.content.readline()
                response.close()
            else:
                task.cancel()
            await asyncio.wait_for(aborted.wait(), LIMIT)
        gate.let(3000)
        await asyncio.wrap_future(engine.loop.call(lambda: None))
        assert engine.loop.load == (0, 0)
        assert engine.loop.steps < 10


async def test_a_client_that_leaves_amid_an_event_is_no_fault(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = web.StreamResponse.write

    async def after_it_left(self: web.StreamResponse, data: Any) -> None:
        assert self._req is not None and self._req.transport is not None
        self._req.transport.close()
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", after_it_left)
    with pytest.raises(aiohttp.ClientError):
        async with asyncio.timeout(LIMIT):
            assert [e async for e in events(url, body(max_new_tokens=30))] == []
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    # Its request has ended, and others are served.
    assert (await call(url, "/generate", body()))[0] == 200


async def test_a_server_whose_loop_died_answers_503_everywhere(
    loaded: LoadedModel, serve: Serve
) -> None:
    def die(forward: Callable[[], Any], call: int) -> Any:
        if call == 3:
            raise RuntimeError("out of luck")
        return forward()

    async with wrapped(loaded, die, max_running_requests=1) as engine:
        url = await serve(engine)
        first = [e async for e in events(url, body())]
        assert "out of luck" in first[-1]["error"]["message"]
        assert (await call(url, "/generate", body()))[0] == 503
        for path in ("/health", "/health_generate"):
            assert (await call(url, path, method="GET"))[0] == 503
        for path in ("/pause_generation", "/continue_generation", "/flush_cache"):
            assert (await call(url, path, {}))[0] == 503
        update = {"model_path": loaded.path}
        assert (await call(url, "/update_weights_from_disk", update))[0] == 503


async def test_the_server_reports_its_model_version_and_limits(url: str) -> None:
    _, info = await call(url, "/model_info", method="GET")
    assert (info["vocab_size"], info["context_length"]) == (380, 2048)
    assert (info["weight_version"], info["is_generation"]) == ("0", True)
    _, server = await call(url, "/server_info", method="GET")
    assert server["max_running_requests"] == 4
    _, version = await call(url, "/get_weight_version", method="GET")
    assert version == {"weight_version": "0"}


def test_a_dead_loop_ends_the_process(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its callers get an answer, and whoever watches it starts another one."""

    def die(forward: Callable[[], Any], call: int) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(EmbeddedEngine, "load", lambda *_: wrapped(loaded, die))
    answers: list[tuple[int, Any]] = []

    def ask(url: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not answers and time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientConnectorError):
                answers.append(asyncio.run(call(url, "/generate", body())))

    with reserve("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["x", "--model-path", "any", "--port", str(port)])
        client = threading.Thread(target=ask, args=(f"http://127.0.0.1:{port}",))
        client.start()
        interval = sys.getswitchinterval()
        assert main() == 1
        sys.setswitchinterval(interval)
        client.join(LIMIT)
    assert answers[0][0] == 503
    assert "the generation loop died: RuntimeError('out of luck')" in capsys.readouterr().err


def test_an_engine_that_cannot_start_exits_with_the_reason(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interval = sys.getswitchinterval()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for path, reason in ((tmp_path, "cannot load"), (tiny_model_dir, "cannot listen")):
            monkeypatch.setattr(sys, "argv", ["x", "--model-path", str(path), "--port", port])
            assert main() == 1
            assert reason in capsys.readouterr().err
    sys.setswitchinterval(interval)
