"""Engines that die, clients that leave, sessions that end while a call is under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from any_agent.completions.params.call import ParseSettings
from any_agent.completions.params.parse import parse_chat
from any_agent.engine.model_fingerprint import shape_of
from any_agent.errors import SessionClosed, StoreBusy, StoreFull, StoreUnavailable
from any_agent.types import GenerationHyperparameters, SessionMode
from proxy_ext.journal import MarkDelivered, Statement
from proxy_ext.web.exchange import EventStream
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import HELLO, Proxy, noticed_hang_up, turned_away, until
from tests.support.proxy_fixtures import Start
from tests.support.retries import hang_up
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_run import FaultKind
from tests.support.sessions import abort, finalize, info

_UNTRUE = ("disagree", "spans")
"""What an engine answers that can be read and cannot be true."""
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


class SlowJournal:
    """Holds the next commits until told to go on, but for the mark of an answer before them."""

    def __init__(self, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = asyncio.Event()
        self.waiting = 0
        self._commit: Callable[..., Awaitable[None]] = proxy.service.journal.commit
        monkeypatch.setattr(proxy.service.journal, "commit", self._held)

    async def _held(self, *statements: Statement) -> None:
        if not all(isinstance(statement, MarkDelivered) for statement in statements):
            self.waiting += 1
            await self.go.wait()
        await self._commit(*statements)


async def test_a_dead_engine_fails_the_call_and_readiness_alone(start: Start) -> None:
    other = ScriptedEngine()
    async with other.serve() as url:
        proxy = await start("engine.update_wait=0.1", engine_url=url, admit=5)
        session = await proxy.open()
    for stream in (False, True):
        response = await proxy.call(session["api_key"], stream=stream)
        turned_away(response, 503, "engine_unavailable")
        assert "x-should-retry" not in response.headers
    assert (await proxy.http.get("/readyz")).status_code == 503
    assert (await proxy.http.get("/healthz")).status_code == 200
    assert await proxy.recorded(session["session_id"]) == []


@BOTH
async def test_a_call_survives_an_engine_that_is_killed_and_restarted(
    proxy: Proxy, engine: ScriptedEngine, stream: bool
) -> None:
    """The agent notices nothing; its tokens say who sampled them."""
    session = await proxy.open()
    key = session["api_key"]
    engine.hold(3)
    call = asyncio.create_task(proxy.call(key, stream=stream))
    await until(lambda: any(len(r.ids) == 3 for r in engine.running.values()))
    await engine.die()
    await until(lambda: proxy.service.engine.away)
    late = asyncio.create_task(proxy.complete(key, max_tokens=2))
    assert (await proxy.http.get("/readyz")).status_code == 503
    await engine.revive("4")
    await late
    answer = await call
    assert answer.status_code == 200
    assert not stream or answer.text.endswith("data: [DONE]\n\n")
    recorded = {len(i.output_ids): i for i in await proxy.recorded(session["session_id"])}
    known = 3 if stream else 0
    assert recorded[8].output_versions.tolist() == [0] * known + [4] * (8 - known)
    assert recorded[2].output_versions.tolist() == [4, 4]
    # What is told of the version follows.
    response = await proxy.call(key)
    assert response.headers["x-any-agent-version"] == "4"
    assert (await proxy.open())["version"] == 4
    assert (await proxy.http.get("/readyz")).json() == {"status": "ready", "version": 4}


@pytest.mark.parametrize(
    "kind", ["error_event", "nan", "null", "disagree", "garbage", "spans", "no_json", "status"]
)
async def test_an_engine_that_fails_amid_a_call_leaves_nothing_of_it(
    proxy: Proxy, engine: ScriptedEngine, kind: FaultKind
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    # What cannot be true is not tried again; what cannot be read may be another time.
    status, code = (500, "engine_mismatch") if kind in _UNTRUE else (503, "engine_unavailable")
    if kind not in ("error_event", "spans"):
        engine.fail(kind)
        response = await proxy.call(key)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    if kind != "status":
        engine.fail(kind, after=3)
        events, done = await proxy.stream(key)
        assert not done
        assert events[-1]["error"]["code"] == code
        assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
    assert await proxy.recorded(session["session_id"]) == []
    # The session goes on.
    _, done = await proxy.stream(key)
    assert done
    assert len(await proxy.recorded(session["session_id"])) == 1


async def test_an_answer_with_token_ids_unknown_to_the_model_is_an_error(
    start: Start, engine: ScriptedEngine, tiny_model_dir: Path
) -> None:
    """No forward pass over them could be made, by any trainer."""
    proxy = await start(shape=shape_of(str(tiny_model_dir)))
    await proxy.admit(5)
    session = await proxy.open()
    engine.fail("unknown_id", after=3)
    events, done = await proxy.stream(session["api_key"])
    assert not done
    engine.fail("unknown_id", after=3)
    response = await proxy.call(session["api_key"])
    assert response.status_code == 500
    for error in (events[-1]["error"], response.json()["error"]):
        assert error["code"] == "engine_mismatch" and "1000000" in error["message"]
    assert await proxy.recorded(session["session_id"]) == []


@BOTH
@pytest.mark.parametrize("how", ["finalize", "abort"])
async def test_ending_a_session_aborts_its_calls(
    proxy: Proxy, engine: ScriptedEngine, stream: bool, how: str
) -> None:
    session = await proxy.open()
    key, id = session["api_key"], session["session_id"]
    first = await proxy.complete(key)
    engine.hold(2)
    call: asyncio.Task[Any] = asyncio.create_task(proxy.stream(key) if stream else proxy.call(key))
    await until(lambda: any(len(r.ids) == 2 for r in engine.running.values()))
    end = finalize(proxy, session, final_reward=1) if how == "finalize" else abort(proxy, session)
    assert (await end)["interactions"] == 1
    if stream:
        events, done = await call
        assert not done and events[-1]["error"]["code"] == "session_closed"
    else:
        refusal(await call, 410, "session_closed", "session was ended")
    await until(lambda: engine.aborted, "the engine's request was not cancelled")
    await until(lambda: not engine.running)
    assert [i.id for i in await proxy.recorded(id)] == [first["id"]]


async def test_a_call_aborted_before_it_began_tells_its_caller(proxy: Proxy) -> None:
    service = proxy.service
    sampling = GenerationHyperparameters(max_new_tokens=8)
    chat = parse_chat({"messages": HELLO}, ParseSettings(SessionMode.EVAL, sampling, "m"))
    session = service.sessions.live[(await proxy.open())["session_id"]]
    prepared, place = service.completer.prepare(chat, None), service.calls.acquire_slot()
    listener = service.calls.start(prepared, session, stream=False, slot=place)
    # A finalize that was scheduled in the same moment: the call's task has not run at all.
    listener.call.abort("the session was ended")
    async with asyncio.timeout(60):
        with pytest.raises(SessionClosed):
            await listener.next()
    listener.slot = place
    await service.calls.release(listener)
    assert len(service.calls) == service.calls.concurrency.in_use == 0
    assert service.calls.stats.ended["train", "aborted"] == 1
    assert not session.calls


@BOTH
async def test_an_answer_that_reached_nobody_is_not_trained_on(
    proxy: Proxy, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await proxy.open()
    first = await proxy.complete(session["api_key"])
    slow = SlowJournal(proxy, monkeypatch)
    noticed = noticed_hang_up(monkeypatch)
    asked = asyncio.create_task(proxy.call(session["api_key"], stream=stream))
    await until(lambda: slow.waiting)
    await hang_up(asked)
    async with asyncio.timeout(60):
        await noticed.wait()
    slow.go.set()

    async def marked() -> bool:
        recorded = await proxy.recorded(session["session_id"])
        return len(recorded) == 2 and recorded[1].untrainable_reason == "undelivered"

    await until(marked, "the interaction was not marked undelivered")
    # A reward without an id is for the last one that the agent got.
    response = await proxy.post("/rl/v1/set_reward", {"reward": 1}, session["api_key"])
    assert response.json()["interaction_id"] == first["id"]
    await proxy.post("/rl/v1/finalize", {}, session["api_key"])
    (trajectory,) = await proxy.lease()
    assert [i.trainable for i in trajectory.interactions] == [True, False]


@BOTH
async def test_an_answer_is_durable_before_it_ends(
    proxy: Proxy, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await proxy.open()
    slow = SlowJournal(proxy, monkeypatch)
    ends: list[Any] = []

    async def call() -> None:
        if stream:
            events, _ = await proxy.stream(session["api_key"])
            ends.append([e for e in events if e["choices"][0]["finish_reason"]])
        else:
            ends.append(await proxy.complete(session["api_key"]))

    task = asyncio.create_task(call())
    await until(lambda: slow.waiting)
    await proxy.http.get("/healthz")
    assert not ends
    slow.go.set()
    await task
    assert ends[0]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StoreUnavailable("the disk is gone", retry_after=5), 503, "store_unavailable"),
        (StoreBusy("too many writes wait"), 503, "store_busy"),
        (StoreFull("no space left"), 507, "store_full"),
    ],
)
async def test_a_failing_store_fails_every_write_and_nothing_is_remembered(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str
) -> None:
    session = await proxy.open()
    key = session["api_key"]
    await proxy.complete(key)

    async def broken(*_: Statement) -> None:
        raise error

    grouped = {"group_id": "g", "group_size": 2}
    with monkeypatch.context() as patched:
        patched.setattr(proxy.service.journal, "commit", broken)
        events, done = await proxy.stream(key)
        assert not done
        assert events[-1]["error"]["code"] == code
        abort_path = f"sessions/{session['session_id']}/abort"
        for path, body, by in (
            ("set_reward", {"reward": 3}, key),
            ("finalize", {"final_reward": 1}, key),
            (abort_path, {}, key),
            ("start_session", {}, None),
            ("start_session", grouped, None),
            ("start_session", {"mode": "eval"}, None),
        ):
            turned_away(await proxy.post(f"/rl/v1/{path}", body, by), status, code)
        turned_away(await proxy.call(key), status, code)
    # Neither calls and rewards, nor slots, nor the group.
    now = await info(proxy, session)
    assert (now["state"], now["interactions"], now["rewards"]) == ("open", 1, {})
    now = await proxy.capacity()
    assert (now["admitted"], now["reserved"], now["running"]) == (1, 0, 1)
    await until(lambda: proxy.service.calls.concurrency.in_use == 0)
    await proxy.open(**grouped)
    await finalize(proxy, session, final_reward=1)


async def test_a_client_that_sends_half_a_body_is_cut_off(start: Start) -> None:
    proxy = await start("server.client_timeout=1", admit=5)
    session = await proxy.open()
    host, port = proxy.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        f"Authorization: Bearer {session['api_key']}\r\nContent-Length: 100\r\n\r\n{{".encode()
    )
    async with asyncio.timeout(60):
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    ended: list[str] = []

    async def events() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            ended.append("events")

    async def finish() -> None:
        ended.append("finish")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    stream = EventStream(events(), {}, finish=finish, send_timeout=0.01, ping=b"")
    with pytest.raises(TimeoutError):
        await stream({"type": "http"}, receive, send)
    assert ended == ["events", "finish"]


async def test_an_unexpected_failure_is_an_answer(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = (await proxy.open())["api_key"]

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret detail")

    body = {"messages": HELLO, "max_tokens": 8}
    for part, path in (
        ("prepare", "/v1/chat/completions"),
        ("run", "/v1/chat/completions"),
        ("find", "/v1/messages"),
        ("find", "/v1/messages/count_tokens"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(proxy.service.completer, part, broken)
            response = await proxy.post(path, body, key)
        assert response.status_code == 500 and "secret" not in response.text
        error = response.json()["error"]
        assert error["code"] == "internal_error"
        assert error["type"] == ("api_error" if "messages" in path else "server_error")
    await proxy.complete(key)


async def test_an_unreadable_answer_reaches_no_log(
    start: Start,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not even its beginning: it may be what agent and model said, which is not to be kept."""
    said = b"what the agent said in confidence"
    proxy = await start("sessions.store_content=false", "engine.update_wait=0.2", admit=5)
    key = (await proxy.open())["api_key"]
    caplog.set_level("DEBUG")
    for form in (b'{"text": "%s"}', b'{"error": "%s"}', b"%s", b'"%s"'):
        monkeypatch.setattr(engine, "_event", lambda *_, form=form: form % said)
        for stream in (False, True):
            response = await proxy.call(key, stream=stream)
            assert response.status_code in (502, 503), response.text
            assert said.decode() not in response.text
    assert said.decode() not in caplog.text
