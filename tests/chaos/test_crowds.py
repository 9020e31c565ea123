"""Crowds that a single key, or nobody's key, can send: the others are served meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from any_agent.rundir.registry import read_stamp
from tests.chaos.conftest import Figure
from tests.support.chaos.hostile import (
    Part,
    Target,
    Wire,
    connected,
    exchange,
    request,
    running_target,
)
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
BODY = b'{"messages": [{"role": "user", "content": "Say a number."}], "max_tokens": 4}'


async def drip(wire: Wire, ended: asyncio.Event) -> None:
    """Send a byte a moment, as a slow body, until the other side closes or the test ends."""
    while await wire.send(b" "):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await ended.wait()
                return


def slow(path: str, key: str, length: int) -> bytes:
    """Return the head of a request, and the first byte of its body of so many."""
    head = request("POST", path, b"{", key=key)
    return head.replace(b"Content-Length: 1\r", b"Content-Length: %d\r" % length)


async def test_slow_bodies_of_one_session_hold_no_place(
    tmp_path: Path, tiny_model_dir: Path, figure: Figure
) -> None:
    """Send more slow bodies than the rank has places; every other session's call is answered."""
    settings = {"client_timeout": 60.0, "max_inflight_calls": 64}
    with running_target(tmp_path, tiny_model_dir, server=settings) as target:
        for part in (target.router, target.proxy):
            await _slow_bodies(target, part)
    figure("70 slow bodies of one session: 20 other sessions opened, called and finalized")


async def _slow_bodies(target: Target, part: Part) -> None:
    _, key = target.open()
    # Too long for the router to wait for the whole of it before a rank gets it.
    head = slow(CHAT, key, 100_000)
    ended = asyncio.Event()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for _ in range(70):
            wire = await stack.enter_async_context(connected(part))
            await wire.send(head)
            group.create_task(drip(wire, ended))
        await asyncio.sleep(1.0)
        for _ in range(20):
            await asyncio.to_thread(target.alive)
        # The key that sends them is served, too.
        assert (await exchange(part, request("POST", CHAT, BODY, key=key))).status == 200
        ended.set()


async def test_a_body_has_one_deadline(tmp_path: Path, tiny_model_dir: Path) -> None:
    """However regular its parts are; and nobody holds a connection for longer."""
    settings = {"client_timeout": 60.0, "body_timeout": 2.0}
    with running_target(tmp_path, tiny_model_dir, server=settings) as target:
        parts, paths = (target.router, target.proxy), (CHAT, "/rl/v1/set_reward")
        cases = [
            (part, slow(path, target.open()[1], length))
            for part, length, path in itertools.product(parts, (100, 100_000), paths)
        ]
        await asyncio.gather(*(_deadline(*case) for case in cases))


async def _deadline(part: Part, head: bytes) -> None:
    ended = asyncio.Event()
    async with connected(part) as wire, asyncio.TaskGroup() as group:
        await wire.send(head)
        group.create_task(drip(wire, ended))
        reply = await wire.reply()
        assert reply.status == 400, reply
        assert reply.error["code"] == "body_timeout"
        assert "server.body_timeout" in reply.error["message"]
        await wire.rest()
        ended.set()


async def test_waiting_opens_do_not_spend_every_descriptor(
    tmp_path: Path, tiny_model_dir: Path, figure: Figure
) -> None:
    """Heartbeat, journal and health go on where the limit of open files cannot be raised."""
    with running_target(tmp_path, tiny_model_dir, open_files=300, max_wait=60.0) as target:
        registry = registry_in(tmp_path)
        for part, own in ((target.router, "router"), (target.proxy, "rank-0")):
            refused = await _spend_descriptors(target, part, registry, own)
            figure(f"{own}: of 600 opens with 300 descriptors {refused} are refused at once")


async def test_idle_sockets_do_not_keep_probes_out(
    tmp_path: Path, tiny_model_dir: Path, figure: Figure
) -> None:
    """Anybody can open them, without a key: those that were idle for longest make room."""
    with running_target(tmp_path, tiny_model_dir, open_files=256) as target:
        registry = registry_in(tmp_path)
        for part, own in ((target.router, "router"), (target.proxy, "rank-0")):
            async with AsyncExitStack() as stack:
                agent = await stack.enter_async_context(served_agent(target, part))
                for _ in range(600):
                    await stack.enter_async_context(connected(part))
                slowest = 0.0
                for number in range(20):
                    began = time.monotonic()
                    path = ("/healthz", "/readyz")[number % 2]
                    assert (await exchange(part, request("GET", path, key=None))).status == 200
                    slowest = max(slowest, time.monotonic() - began)
                await until(has_beaten(registry, own), "a heartbeat")
                # An agent that came before them is served on its connection.
                await agent()
            await until(lambda part=part: part.connections < 16, "the connections' end")
            figure(f"{own}: 20 probes answered 200 beside 600 idle sockets, within {slowest:.2f} s")
        await asyncio.to_thread(target.alive)


async def _spend_descriptors(target: Target, part: Part, registry: Path, own: str) -> int:
    data = request("POST", "/rl/v1/start_session", b'{"wait": 60}')
    async with AsyncExitStack() as stack:
        # A session that is there already is served on its connection.
        agent = await stack.enter_async_context(served_agent(target, part))
        wires = [await stack.enter_async_context(connected(part)) for _ in range(600)]
        asking = [asyncio.create_task(wire.ask(data)) for wire in wires]
        await until(lambda: sum(task.done() for task in asking) > 400, "most are refused")
        for _ in range(3):
            # The heartbeat goes on, ...
            await until(has_beaten(registry, own), "a heartbeat")
            # ... so does health, on a new connection, and the journal.
            assert (await exchange(part, request("GET", "/healthz", key=None))).status == 200
            await agent()
        refused = [task.result() for task in asking if task.done()]
        for task in asking:
            task.cancel()
    told = [reply for reply in refused if reply.status]
    assert told and {reply.status for reply in told} == {503}
    assert {reply.error["code"] for reply in told} == {"too_many_connections"}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in told)
    await until(lambda: part.connections < 16, "the connections' end")
    await asyncio.to_thread(target.alive)
    return len(refused)


@asynccontextmanager
async def served_agent(target: Target, part: Part) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """An agent that was served before the crowd came, and that calls again on its connection."""
    _, key = target.open()

    async def call() -> None:
        assert (await wire.ask(request("POST", CHAT, BODY, key=key))).status == 200

    async with connected(part) as wire:
        await call()
        yield call


def registry_in(folder: Path) -> Path:
    (found,) = folder.glob("runs/*/*/*/registry")
    return found


def has_beaten(registry: Path, part: str) -> Callable[[], bool]:
    """True once the part has written its entry again."""
    before = read_stamp(registry, part)
    return lambda: read_stamp(registry, part) != before
