"""What happens to a session in forked processes, at the end of the process, on other event loops,
and when Ctrl-C comes at the worst moment."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import pytest
from openai import APIStatusError

from any_agent import AgentSession
from any_agent.client.rl_client import RLClient
from any_agent.protocol.rl import SessionStarted
from any_agent.sdk import sdk_thread as background
from any_agent.sdk.find_service import ServiceAddress
from any_agent.sdk.sdk_thread import Heartbeats
from any_agent.sdk.session import AsyncSession
from tests.support.proxy import until
from tests.support.sdk.hops import serving
from tests.support.sdk_fixtures import Served

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


async def test_it_is_used_on_another_event_loop(served: Served) -> None:
    async with AgentSession(mode="eval") as session:

        async def there() -> str:
            async with asyncio.timeout(120):
                return (await session.info()).state

        assert await asyncio.to_thread(asyncio.run, there()) == "open"
        await session.abort()


async def test_ctrl_c_just_as_it_was_opened(
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


async def test_it_is_entered_once_at_a_time(served: Served) -> None:
    one = AgentSession(mode="eval")
    entered = await asyncio.gather(one.__aenter__(), one.__aenter__(), return_exceptions=True)
    assert isinstance(entered[1], RuntimeError)
    await one.__aexit__(None, None, None)
    assert len([line async for line in served.proxy.client.sessions()]) == 1


async def test_its_clients_follow_nobody_elsewhere() -> None:
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


def test_what_opened_it_shows_no_key() -> None:
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
