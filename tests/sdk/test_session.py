"""A session around an agent's code: opened, rewarded, ended, in its blocking form as well."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI

from any_agent import AgentSession
from any_agent.client import backoff
from any_agent.client.rl_client import RLClient
from any_agent.errors import (
    AgentFailed,
    ConfigError,
    InvalidRequest,
    TooManyRequests,
    Unauthenticated,
    Unprocessable,
)
from any_agent.protocol.rl import SessionStarted
from any_agent.sdk import AsyncSession, Session
from any_agent.sdk import open_session as opening
from any_agent.sdk import sdk_thread as background
from any_agent.sdk.find_service import ServiceAddress
from any_agent.sdk.sdk_thread import Heartbeats
from tests.support.errors import fails_with
from tests.support.proxy import HELLO, until
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sdk.hops import serving
from tests.support.sdk_fixtures import Serve, Served


async def answered(session: AsyncSession) -> str:
    """The id of one completion."""
    async with session.openai() as client:
        completion = await client.chat.completions.create(
            model="default", messages=HELLO, max_tokens=4
        )
    return completion.id


async def test_a_session_that_is_left_normally_is_finalized(served: Served) -> None:
    async with AgentSession("task-1", group_size=2, metadata={"level": 3}) as session:
        assert isinstance(session, AsyncSession)
        assert session.base_url == f"{served.url}/v1"
        assert (session.mode, session.version, session.task_id) == ("train", 0, "task-1")
        await answered(session)
        await session.set_reward(0.5)
        assert (await session.info()).state == "open"
    info = await served.info(session.session_id)
    assert (info["state"], info["interactions"]) == ("finalized", 1)
    assert list(info["rewards"].values()) == [0.5]
    assert info["tenant"] == "agents"


async def test_a_session_that_was_ended_is_left_as_it_is(served: Served) -> None:
    async with AgentSession() as session:
        await answered(session)
        await session.finalize(2.0)
    assert (await served.info(session.session_id))["final_reward"] == 2.0
    async with AgentSession() as session:
        await session.abort("no good")
    info = await served.info(session.session_id)
    assert (info["state"], info["reason"]) == ("aborted", "no good")
    async with AgentSession() as session:
        session.detach()
    assert await served.state(session.session_id) == "open"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, asyncio.CancelledError])
async def test_a_session_that_is_left_by_an_exception_is_aborted(
    served: Served, kind: type[BaseException]
) -> None:
    opened: list[AsyncSession] = []
    with pytest.raises(kind):
        async with AgentSession() as session:
            opened.append(session)
            raise kind("the password is hunter2")
    info = await served.info(opened[0].session_id)
    assert info["state"] == "aborted"
    if kind is asyncio.CancelledError:
        assert "was cancelled" in info["reason"] and kind.__name__ not in info["reason"]
    else:
        assert info["reason"] == f"its agent raised {kind.__name__}"


async def test_rewards_by_name_by_completion_and_of_the_whole_are_added_up(served: Served) -> None:
    async with AgentSession() as session:
        first = await answered(session)
        last = await answered(session)
        await session.set_reward({"correct": 1.0, "format": 0.25}, first)
        await session.set_reward(0.5)
        await session.set_final_reward(3.0)
    info = await served.info(session.session_id)
    assert info["rewards"] == {first: 1.25, last: 0.5}
    assert info["final_reward"] == 3.0


async def test_what_a_function_returned_is_its_reward(served: Served) -> None:
    async with AgentSession() as session:
        first, last = await answered(session), await answered(session)
        await session.set_returned(None)
        await session.set_returned(1)
        await session.set_returned({first: True})
        assert (await session.info()).rewards == {first: 1.0, last: 1.0}
        with fails_with(AgentFailed, "my_agent", "'good'", code="invalid_reward"):
            await session.set_returned("good", "my_agent")
        with fails_with(AgentFailed, "chatcmpl-other", code="invalid_reward"):
            await session.set_returned({"chatcmpl-other": 1.0})


async def test_an_agent_that_makes_no_call_is_told_where_it_should_have(served: Served) -> None:
    with fails_with(Unprocessable, f"{served.url}/v1", code="no_interactions"):
        async with AgentSession() as session:
            pass
    assert await served.state(session.session_id) == "aborted"
    with fails_with(AgentFailed, code="no_model_call"):
        async with AgentSession() as session:
            await session.set_returned(1.0)


async def test_no_reward_is_an_error_unless_it_is_awaited_or_let_go(served: Served) -> None:
    states = {
        "error": ("aborted", "not finalized: no_reward"),
        "await": ("awaiting_reward", None),
        "abort": ("aborted", "it was given no reward"),
    }
    for wanted, state in states.items():
        options: Any = {} if wanted == "error" else {"on_missing_reward": wanted}
        opened: list[AsyncSession] = []
        try:
            async with AgentSession(**options) as session:
                opened.append(session)
                await answered(session)
        except Unprocessable as refused:
            assert (wanted, refused.code) == ("error", "no_reward")
        else:
            assert wanted != "error"
        info = await served.info(opened[0].session_id)
        assert (info["state"], info["reason"]) == state


@pytest.mark.parametrize("reward", ["good", "1.0", float("nan"), None])
async def test_a_reward_that_is_none_is_refused_as_the_service_would(
    served: Served, reward: Any
) -> None:
    async with AgentSession() as session:
        await answered(session)
        with pytest.raises(InvalidRequest):
            await session.set_reward(reward)
        await session.set_reward(1.0)


async def test_the_same_key_gives_the_same_session(served: Served) -> None:
    async with AgentSession(idempotency_key="run-1-0") as session:
        session.detach()
    async with AgentSession(idempotency_key="run-1-0") as again:
        assert again.session_id == session.session_id
        await answered(again)
        await again.finalize(1.0, idempotency_key="run-1-0-end")
        info = await again.finalize(1.0, idempotency_key="run-1-0-end")
        assert info.state == "finalized"


async def test_an_open_waits_for_a_slot(serve: Serve) -> None:
    served = await serve(slots=0)
    url, key = served.url, served.tenant_key
    with pytest.raises(TooManyRequests):
        async with AgentSession(url=url, api_key=key, wait=0):
            pass
    opening = AgentSession("a", group_size=1, url=url, api_key=key, on_missing_reward="abort")
    waiting = asyncio.create_task(opening.__aenter__())
    await until(lambda: served.proxy.service.sessions.admission.waiting)
    await served.proxy.admit(5)
    session = await waiting
    await session.abort()
    await opening.__aexit__(None, None, None)


async def test_whoever_is_cancelled_while_it_waits_leaves_nothing_open(serve: Serve) -> None:
    served = await serve(slots=0)
    opening = AgentSession("a", group_size=1, url=served.url, api_key=served.tenant_key)
    waiting = asyncio.create_task(opening.__aenter__())
    admission = served.proxy.service.sessions.admission
    await until(lambda: admission.waiting)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: not admission.waiting)
    await served.proxy.admit(5)
    assert (await served.proxy.capacity())["running"] == 0


async def test_a_session_that_opened_while_its_opener_was_cancelled_is_aborted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service has opened it, and its answer is on the way."""
    started, send = asyncio.Event(), RLClient.request

    async def held(
        client: RLClient, method: str, path: str, *arguments: Any, **how: Any
    ) -> httpx.Response:
        answer = await send(client, method, path, *arguments, **how)
        if path == "/start_session" and not started.is_set():
            started.set()
            await asyncio.sleep(60)
        return answer

    monkeypatch.setattr(RLClient, "request", held)
    # With a key of its own somebody comes again for the place in the group.
    lost = AgentSession("lost", group_id="both", group_size=2, idempotency_key="first")
    opening = asyncio.create_task(lost.__aenter__())
    await started.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    lines = [line async for line in served.proxy.client.sessions(task_id="lost")]
    assert [(line.state, line.reason) for line in lines] == [
        ("aborted", "its opener was cancelled")
    ]
    monkeypatch.setattr(RLClient, "request", send)
    for name in ("second", "third"):
        again = AgentSession("lost", group_id="both", group_size=2, idempotency_key=name)
        (await again.__aenter__()).detach()
        await again.__aexit__(None, None, None)


async def test_wrong_keys_and_fields_are_refused_by_name(served: Served) -> None:
    with fails_with(Unauthenticated, served.url, "key of api_key"):
        async with AgentSession(api_key="sk-tenant.0.wrong"):
            pass
    with fails_with(InvalidRequest, "'no name'", param="task_id"):
        AgentSession("no name")
    with fails_with(InvalidRequest, "version", "eval"):
        AgentSession(version=3)
    async with AgentSession() as session:
        with fails_with(ConfigError, "api_key", "keys create"):
            AgentSession(api_key=session.api_key)
        assert session.api_key not in repr(session)
        await session.abort()


async def test_the_blocking_form_of_a_session_does_the_same(served: Served) -> None:
    def agent() -> str:
        with AgentSession("task-1", group_size=1) as session:
            assert isinstance(session, Session)
            with session.openai() as client:
                answer = client.chat.completions.create(
                    model="default", messages=HELLO, max_tokens=4
                )
            session.set_reward(0.25, answer.id)
            assert session.info().state == "open"
            return session.session_id

    id = await asyncio.to_thread(agent)
    info = await served.info(id)
    assert (info["state"], list(info["rewards"].values())) == ("finalized", [0.25])


async def test_the_blocking_form_does_not_block_an_event_loop(served: Served) -> None:
    with fails_with(RuntimeError, "async with AgentSession"), AgentSession():
        pass
    async with AgentSession() as session:
        with fails_with(RuntimeError, "asyncio.to_thread"):
            session.blocking.set_reward(1.0)
        await asyncio.to_thread(session.blocking.abort, "from a thread")
    assert (await served.info(session.session_id))["reason"] == "from a thread"


async def test_a_slow_tool_does_not_let_its_session_expire(
    serve: Serve, engine: ScriptedEngine
) -> None:
    served = await serve("sessions.idle_timeout=3")
    async with AgentSession(url=served.url, api_key=served.tenant_key) as session:
        await answered(session)
        await asyncio.sleep(5)
        await session.set_reward(1.0)
    assert await served.state(session.session_id) == "finalized"


async def test_calls_outside_of_a_session_say_what_is_missing(served: Served) -> None:
    async with AsyncOpenAI(max_retries=0) as client:
        with fails_with(APIStatusError, "/rl/v1/start_session", status_code=401, code="no_session"):
            await client.chat.completions.create(model="m", messages=HELLO)
        async with AgentSession() as session:
            await answered(session)
            await session.set_reward(1.0)

            async def late() -> str:
                await over.wait()
                with pytest.raises(APIStatusError) as refused:
                    await client.chat.completions.create(model="m", messages=HELLO)
                return str(refused.value)

            over = asyncio.Event()
            left = asyncio.create_task(late())
            await asyncio.sleep(0)
        async with AgentSession() as another:
            over.set()
            assert "finalized" in await left
            assert (await another.info()).interactions == 0
            await another.abort()


async def test_ctrl_c_ends_the_blocking_forms_wait(serve: Serve) -> None:
    served = await serve(slots=0)
    code = f"""
from any_agent import AgentSession
with AgentSession("a", group_size=1, url={served.url!r}, api_key={served.tenant_key!r}):
    pass
"""
    waiting = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE
    )
    admission = served.proxy.service.sessions.admission
    await until(lambda: admission.waiting)
    waiting.send_signal(signal.SIGINT)
    _, said = await asyncio.wait_for(waiting.communicate(), 60)
    assert said.rstrip().endswith(b"KeyboardInterrupt")
    await until(lambda: not admission.waiting)
    await served.proxy.admit(5)
    assert (await served.proxy.capacity())["running"] == 0


FORKED = """
import os, sys
from any_agent import AgentSession

with AgentSession(mode="eval") as session:
    child = os.fork()
    if child == 0:
        assert session.info().state == "open"
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert session.info().state == "open", session.info()
    session.abort("of the parent")
"""

# Not by the package's own name, which says on a busy machine that its first import takes long.
LEFT_OPEN = """
from any_agent.sdk import AgentSession

def sessions():
    with AgentSession(mode="eval") as session:
        yield session

generator = sessions()
next(generator)
"""


async def run(code: str) -> bytes:
    """What it said on stderr; it ends well, and soon."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), 45)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode == 0, said.decode()
    return said


@pytest.mark.service
async def test_a_process_forked_off_in_a_session_uses_it_and_does_not_end_it(
    served: Served,
) -> None:
    await run(FORKED)
    lines = [line async for line in served.proxy.client.sessions()]
    assert [line.reason for line in lines] == ["of the parent"]


@pytest.mark.service
async def test_a_session_that_nobody_ends_does_not_hold_up_the_end_of_the_process(
    served: Served,
) -> None:
    assert await run(LEFT_OPEN) == b""


async def test_a_session_may_be_used_on_another_event_loop(served: Served) -> None:
    async with AgentSession(mode="eval") as session:

        async def there() -> str:
            async with asyncio.timeout(120):
                return (await session.info()).state

        assert await asyncio.to_thread(asyncio.run, there()) == "open"
        await session.abort()


async def test_ctrl_c_just_as_a_session_was_opened_leaves_none_open(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, interrupted = background.wait_for, False

    def wait_for(coroutine: Coroutine[Any, Any, Any], *arguments: Any, **named: Any) -> Any:
        nonlocal interrupted
        answer = wait(coroutine, *arguments, **named)
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr("any_agent.sdk.open_session.wait_for", wait_for)

    def agent() -> None:
        with pytest.raises(KeyboardInterrupt), AgentSession():
            pass

    await asyncio.to_thread(agent)
    lines = [line async for line in served.proxy.client.sessions()]
    assert [line.reason for line in lines] == ["its agent raised KeyboardInterrupt"]


async def test_a_session_is_entered_once_at_a_time(served: Served) -> None:
    one = AgentSession(mode="eval")
    entered = await asyncio.gather(one.__aenter__(), one.__aenter__(), return_exceptions=True)
    assert isinstance(entered[1], RuntimeError)
    await one.__aexit__(None, None, None)
    assert len([line async for line in served.proxy.client.sessions()]) == 1


async def test_clients_of_a_session_follow_no_redirect_to_another_server() -> None:
    async with serving() as service, serving() as elsewhere:
        path = "/v1/chat/completions"
        service.redirects[path] = f"{elsewhere.url}{path}"
        session = AsyncSession(ServiceAddress(service.url), started(60), retry_for=1)
        async with session.openai() as client:
            with pytest.raises(APIStatusError):
                await client.chat.completions.create(model="m", messages=[])
        assert [path for path, _ in service.seen] == [path]
        assert not elsewhere.seen


def started(idle_in: float) -> SessionStarted:
    return SessionStarted(
        session_id="ses-0-1",
        api_key="sk-v1.0.secret",
        base_url="http://127.0.0.1:1/v1",
        mode="eval",
        version=0,
        group_id=None,
        task_id=None,
        expires_in=60.0,
        idle_in=idle_in,
    )


def test_the_opener_of_a_session_shows_no_key() -> None:
    assert "secret" not in repr(started(1.0))


async def test_sessions_of_one_id_have_beats_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two services may give the same; and one may be opened twice, and left once."""
    beats: list[SessionStarted] = []

    async def heartbeat(client: RLClient, session: SessionStarted) -> None:
        beats.append(session)

    monkeypatch.setattr(RLClient, "heartbeat", heartbeat)
    hearts, service = Heartbeats(), ServiceAddress("http://127.0.0.1:1")
    first, second = started(0.6), started(0.6)
    hearts.add(service, first)
    hearts.add(service, second)
    await until(lambda: {id(one) for one in beats} == {id(first), id(second)})
    hearts.remove(first)
    beats.clear()
    await until(lambda: beats)
    assert beats[0] is second
    hearts.remove(second)


SERVICE = ServiceAddress("http://there:8000", None)


class Full:
    """A service without a slot, and time that passes by waiting for one only."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting = 1
        """At the same time."""

    def monotonic(self) -> float:
        return self.now

    async def start_session(self, *, wait: float, **_: Any) -> None:
        self.now += wait / self.waiting
        raise TooManyRequests("none is free: g1 has 2 of 4 sessions", retry_after=1)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Full:
    full = Full()
    monkeypatch.setattr(opening, "time", full)
    monkeypatch.setattr(opening, "next_notice", -math.inf)
    monkeypatch.setattr(opening, "asks_early", True)
    monkeypatch.setattr(backoff, "time", full)
    monkeypatch.setattr(backoff, "jittered", lambda *_: 0.0)
    return full


async def waits(full: Full, seconds: float) -> None:
    client = cast(RLClient, full)
    with pytest.raises(TooManyRequests):
        await opening.open_session(client, SERVICE, {}, wait=seconds, idempotency_key=None)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what openings logged: threads that another test left may log, too."""
    return [each.getMessage() for each in caplog.records if each.name == opening.__name__]


async def test_the_first_wait_says_within_seconds_what_it_waits_for(
    full: Full, caplog: pytest.LogCaptureFixture
) -> None:
    await waits(full, 50)
    (line,) = said(caplog)
    assert "waited 2 s for a slot at http://there:8000: none is free: g1 has 2 of 4" in line
    assert caplog.records[0].levelno == logging.WARNING
    caplog.clear()
    await waits(full, 50)
    assert said(caplog) == []


async def test_a_callers_key_has_one_body(full: Full, caplog: pytest.LogCaptureFixture) -> None:
    """The service refuses a key that comes with another one."""
    start = AsyncMock(side_effect=full.start_session)
    client = cast(RLClient, SimpleNamespace(start_session=start))
    with pytest.raises(TooManyRequests):
        await opening.open_session(client, SERVICE, {}, wait=90, idempotency_key="mine")
    assert len(start.await_args_list) > 2
    assert all(call == start.await_args for call in start.await_args_list)


async def test_of_many_opens_that_wait_only_one_says_so(
    full: Full, caplog: pytest.LogCaptureFixture
) -> None:
    full.waiting = 100
    free = cast(RLClient, SimpleNamespace(start_session=AsyncMock()))
    await opening.open_session(free, SERVICE, {}, wait=50, idempotency_key=None)
    await asyncio.gather(*(waits(full, 1000) for _ in range(full.waiting)))
    assert 10 <= len(said(caplog)) <= 1 + 1000 / 60
