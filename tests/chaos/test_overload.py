"""Ten times as many calls as the engine keeps up with: those that are admitted are hardly slower,
the others are told at once when to come again, and no part's memory grows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from any_agent.config import load_config
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.registry import RegistryEntry
from tests.chaos.conftest import Figure
from tests.support.chaos.killable import KillableProxy, heartbeats
from tests.support.ports import own_port
from tests.support.real_parts import await_url, process
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import meanwhile

SLOTS = 16
TOKENS = 8
SERVICE_SECONDS = 0.8
"""Of one call that the engine samples at once."""
CAPACITY = SLOTS / SERVICE_SECONDS
"""Calls a second that the engine keeps up with."""
OVERLOAD = 10
SLOWER = 5.0
"""An admitted call's p99 may be so many times that of an idle service."""
PARTS = 4
"""Processes that a call goes through. A machine that others use, too, makes each of them late."""
GROWTH = 96 * 2**20
"""Bytes that a part's resident memory may grow by under the overload; it records what it admits."""
LIMIT = 240.0


def serve_engine(url: Connection) -> None:
    """An engine of known capacity, in a process of its own."""

    async def serve() -> None:
        engine = ScriptedEngine(slots=SLOTS, pace=SERVICE_SECONDS / TOKENS)
        async with engine.serve() as at:
            url.send(at)
            await asyncio.Event().wait()

    asyncio.run(serve())


@contextlib.contextmanager
def engine_process() -> Iterator[str]:
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    child = context.Process(target=serve_engine, args=(there,), daemon=True)
    child.start()
    try:
        assert here.poll(LIMIT), "the engine did not start"
        yield here.recv()
    finally:
        child.kill()
        child.join(LIMIT)


@dataclass
class Parts:
    url: str
    pids: dict[str, int]

    def memory(self) -> dict[str, int]:
        """Resident bytes."""
        return {name: psutil.Process(pid).memory_info().rss for name, pid in self.pids.items()}


@contextlib.contextmanager
def service(folder: Path, model: Path) -> Iterator[Parts]:
    """Router, proxy and engine, each a process."""
    settings = {
        "root": str(folder / "runs"),
        "server": {"ranks": 1},
        "sessions": {"group_size": 2},
        # No more than the engine's slots twice: the trainer's own sessions are no exception.
        "rollout": {"batch_size": 2, "max_concurrent": SLOTS},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    run_dir = trial_dir(load_config(path, [], {}))
    run_dir.create()
    port, log = own_port(), folder / "router.log"
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(engine_process())
        proxy = KillableProxy(
            folder / "runs",
            model,
            engine,
            "server.ranks=1",
            "sessions.group_size=2",
            "rollout.batch_size=2",
            f"rollout.max_concurrent={SLOTS}",
        )
        stack.callback(proxy.close)
        proxy.start()
        entry = RegistryEntry(name="rank-0", boot_id="one", url=proxy.url, pid=1)
        stack.enter_context(heartbeats(run_dir.registry, entry))
        arguments = ("--config", str(path), "--host", "127.0.0.1", "--port", str(port))
        router = stack.enter_context(process(log, "router", *arguments))
        await_url(f"{url}/readyz", router, log)
        yield Parts(url, {"proxy": proxy.pid, "router": router.pid})


@dataclass
class Crowd:
    """Clients that send at their own pace, whatever becomes of what they sent."""

    http: aiohttp.ClientSession
    keys: list[str]
    seconds: list[float] = field(default_factory=list)
    """Of the calls that were admitted, from when they were due."""
    said: Counter[str] = field(default_factory=Counter)
    """Answers, by status and code."""
    wrong: list[str] = field(default_factory=list)
    """Refusals that do not say when to come again, and connections that broke."""
    refusal_seconds: list[float] = field(default_factory=list)

    async def call(self, number: int, due: float) -> None:
        """One model call."""
        key = self.keys[number % len(self.keys)]
        messages = [{"role": "user", "content": f"Say a number, not {number}."}]
        stream = number % 4 == 0
        body = {"model": "gpt-4o", "messages": messages, "max_tokens": TOKENS, "stream": stream}
        if await self._ask("/v1/chat/completions", body, key, due) == 200:
            self.seconds.append(time.monotonic() - due)

    async def open(self, wait: float, due: float) -> None:
        """A train session: the trainer admits none."""
        await self._ask("/rl/v1/start_session", {"wait": wait}, None, due)

    async def _ask(self, path: str, body: dict[str, Any], key: str | None, due: float) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        try:
            async with self.http.post(path, json=body, headers=headers) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.wrong.append(f"{path}: {error!r}")
            return 0
        if response.status == 200:
            self.said["200"] += 1
            if body.get("stream") and not content.endswith(b"data: [DONE]\n\n"):
                self.wrong.append(f"{path}: a stream that ends with {content[-80:]!r}")
            return 200
        code = json.loads(content)["error"]["code"]
        self.said[f"{response.status} {code}"] += 1
        after = response.headers.get("Retry-After", "")
        if response.status not in (429, 503, 507) or not (after.isdigit() and int(after) > 0):
            self.wrong.append(f"{path}: {response.status} {code}, Retry-After {after!r}")
        if code == "too_many_calls":
            self.refusal_seconds.append(time.monotonic() - due)
        return response.status


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]


async def flood(crowd: Crowd, seconds: float, rate: float) -> None:
    """``rate`` calls a second, and opens of train sessions beside them."""
    began, tasks = time.monotonic(), []
    for number in range(int(seconds * rate)):
        due = began + number / rate
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(crowd.call(number, due)))
        if number % 10 == 0:
            tasks.append(asyncio.create_task(crowd.open(number % 20 / 10, due)))
    await asyncio.gather(*tasks)


@dataclass
class Lateness:
    """How late this process is to do what is due, which is no fault of the service."""

    seconds: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        while True:
            due = time.monotonic() + 0.05
            await asyncio.sleep(0.05)
            self.seconds.append(time.monotonic() - due)

    def allowed(self, unloaded: float) -> float:
        """What an admitted call's p99 may be."""
        return SLOWER * unloaded + PARTS * p99(self.seconds)


async def watch(parts: Parts, most: dict[str, int]) -> None:
    while True:
        for name, size in parts.memory().items():
            most[name] = max(most.get(name, 0), size)
        await asyncio.sleep(0.25)


async def at_rest(crowd: Crowd) -> Crowd:
    """What its calls take while half of the engine's slots are free."""
    rounds = 6
    for number in range(rounds):
        now = time.monotonic()
        await asyncio.gather(*(crowd.call(k, now) for k in range(SLOTS // 2)))
        if number == 0:
            # The first ones load what all later ones have.
            crowd.seconds.clear()
    assert crowd.said == {"200": rounds * SLOTS // 2}, (crowd.said, crowd.wrong)
    return crowd


async def measure(parts: Parts, long: bool, figure: Figure) -> None:
    seconds = 60.0 if long else 8.0
    timeout, connector = aiohttp.ClientTimeout(total=LIMIT), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(parts.url, timeout=timeout, connector=connector) as http:
        keys = []
        for _ in range(2 * SLOTS):
            async with http.post("/rl/v1/start_session", json={"mode": "eval"}) as response:
                keys.append((await response.json())["api_key"])
        idle = await at_rest(Crowd(http, keys))
        # What the first seconds of load allocate once is no growth.
        await flood(Crowd(http, keys), 2.0, OVERLOAD * CAPACITY)
        before = parts.memory()
        crowd, most = Crowd(http, keys), dict(before)
        late = Lateness()
        async with meanwhile(watch(parts, most), late.watch()):
            await flood(crowd, seconds, OVERLOAD * CAPACITY)
    asked, admitted = sum(crowd.said.values()), crowd.said["200"]
    unloaded, loaded = p99(idle.seconds), p99(crowd.seconds)
    grown = {name: most[name] - before[name] for name in most}
    figure(
        f"{seconds:g} s at {OVERLOAD}x the capacity of {CAPACITY:g} calls/s: {asked} requests, "
        f"{admitted} admitted, {asked - admitted} refused {dict(crowd.said)}, "
        f"{len(crowd.wrong)} otherwise"
    )
    figure(
        f"admitted p99 {loaded:.2f} s, unloaded {unloaded:.2f} s: {loaded / unloaded:.1f}x; a "
        f"refusal's median {sorted(crowd.refusal_seconds)[len(crowd.refusal_seconds) // 2]:.3f} s"
    )
    figure(
        "resident memory grew by at most "
        + ", ".join(f"{size / 2**20:.0f} MiB ({name})" for name, size in grown.items())
    )
    assert not crowd.wrong, crowd.wrong[:5]
    assert crowd.said["429 too_many_calls"] and crowd.said["429 no_capacity"]
    assert admitted >= (0.5 if long else 0.25) * seconds * CAPACITY, "the engine was kept busy"
    # The short form has too few samples for a tail: it looks for a stall.
    assert loaded <= (1 if long else 5) * late.allowed(unloaded)
    assert max(grown.values()) <= GROWTH, grown


def test_the_service_holds_its_bounds_at_ten_times_its_capacity(
    tmp_path: Path, tiny_model_dir: Path, long: bool, figure: Figure
) -> None:
    with service(tmp_path, tiny_model_dir) as parts:
        asyncio.run(measure(parts, long, figure))
