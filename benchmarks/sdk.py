"""The cost of the SDK in its user's process: ``python benchmarks/sdk.py``.

`AgentRunner` with its file of results runs a thousand mock agents at once, which make no call and
return a reward, against a service that only answers. The peers are the same three requests of each
session by bare httpx and bare aiohttp, which keep nothing. At the end come the times of `import
any_agent` and `any-agent --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, TCPConnector, web
from common import child, finish, machine, median, parser, ratio, wait_until_up

AT_ONCE = 1000
SESSIONS = 3000
SLOW = {"httpx"}
"""Contenders that do a third of the sessions."""
ROUNDS = 3
STARTS = 9
GROUP = 8
AGENT_TAKES = 0.2
"""Seconds that a mock agent sleeps."""

# -- the service ---

_INFO = {
    "state": "finalized",
    "reason": None,
    "mode": "train",
    "tenant": None,
    "opened_by": "tenant",
    "content": "stored",
    "interactions": 1,
    "rewards": {"chatcmpl-1": 1.0},
    "final_reward": None,
    "rewarded": True,
    "first_version": 0,
    "last_version": 0,
    "pinned_version": None,
    "step": None,
    "created_at": 0.0,
    "ended_at": 0.0,
    "expires_in": None,
    "idle_in": None,
    "awaits_in": None,
}
_RUN = {
    "experiment": "e",
    "trial": "t",
    "user": "u",
    "model": "m",
    "state": "training",
    "version": 0,
    "step": 0,
    "checkpoint": None,
}


def serve(port: int) -> None:
    """A server that answers like a service and stores nothing."""
    count = 0

    async def run_info(_: web.Request) -> web.Response:
        return _answer(_RUN)

    async def start(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        body = await request.json()
        key = f"sk-v1.0.{count:x}.{'0' * 32}"
        started: dict[str, Any] = {"session_id": f"ses-0-{count}", "api_key": key}
        started |= {"base_url": "http://127.0.0.1/v1", "mode": "train", "version": 0}
        started |= {"group_id": body["group_id"], "task_id": body["task_id"]}
        return _answer({**started, "expires_in": 3600.0, "idle_in": 1800.0})

    async def set_reward(_: web.Request) -> web.Response:
        return _answer({"session_id": "ses-0-1", "interaction_id": "chatcmpl-1", "reward": 1.0})

    async def finalize(_: web.Request) -> web.Response:
        return _answer({"session_id": "ses-0-1", "task_id": "t", "group_id": "g", **_INFO})

    app = web.Application()
    app.router.add_get("/rl/v1/run", run_info)
    app.router.add_post("/rl/v1/start_session", start)
    app.router.add_post("/rl/v1/set_reward", set_reward)
    app.router.add_post("/rl/v1/finalize", finalize)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def _answer(data: dict[str, Any]) -> web.Response:
    return web.json_response(data, headers={"x-any-agent-api": "1"})


# -- contenders, each in a process of its own ---


async def by_runner(url: str, sessions: int) -> None:
    from any_agent import AgentRunner

    async def agent(item: int) -> float:
        await asyncio.sleep(AGENT_TAKES)
        return 1.0

    with tempfile.TemporaryDirectory() as folder:
        runner = AgentRunner(
            url=url,
            concurrency=AT_ONCE,
            group_size=GROUP,
            results=Path(folder) / "results.jsonl",
            progress=False,
        )
        results = await runner.arun(agent, range(sessions // GROUP))
    assert len(results) == sessions and not results.failed


async def by_httpx(url: str, sessions: int) -> None:
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as http:

        async def post(path: str, body: dict[str, Any], key: str = "") -> Any:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            response = await http.post(f"/rl/v1{path}", json=body, headers=headers)
            response.raise_for_status()
            return response.json()

        await _all_of(post, sessions)


async def by_aiohttp(url: str, sessions: int) -> None:
    async with ClientSession(url, connector=TCPConnector(limit=0)) as http:

        async def post(path: str, body: dict[str, Any], key: str = "") -> Any:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with http.post(f"/rl/v1{path}", json=body, headers=headers) as response:
                response.raise_for_status()
                return await response.json()

        await _all_of(post, sessions)


async def by_nobody(_: str, sessions: int) -> None:
    """Run the mock agents alone."""
    await _all_of(None, sessions)


async def _all_of(post: Callable[..., Awaitable[Any]] | None, sessions: int) -> None:
    places = iter(range(sessions))

    async def worker() -> None:
        for place in places:
            if post is None:
                await asyncio.sleep(AGENT_TAKES)
                continue
            group = f"run-{place // GROUP}"
            opening = {"task_id": group, "group_id": group, "group_size": GROUP, "wait": 25}
            started = await post("/start_session", opening)
            await asyncio.sleep(AGENT_TAKES)
            await post("/set_reward", {"reward": 1.0}, started["api_key"])
            await post("/finalize", {}, started["api_key"])

    await asyncio.gather(*(worker() for _ in range(min(AT_ONCE, sessions))))


CONTENDERS = {
    "AgentRunner": by_runner,
    "httpx": by_httpx,
    "aiohttp": by_aiohttp,
    "nothing": by_nobody,
}


def contend(name: str, url: str, sessions: int) -> None:
    """Print the CPU and the wall time of a session in this process."""

    sessions = sessions // 3 if name in SLOW else sessions

    async def measured() -> tuple[float, float]:
        contender = CONTENDERS[name]
        await contender(url, 12 * GROUP)
        cpu, wall = time.process_time(), time.monotonic()
        await contender(url, sessions)
        took = time.process_time() - cpu, time.monotonic() - wall
        return took[0] / sessions, took[1] / sessions

    print(json.dumps(asyncio.run(measured())))


# -- the tables ---


def compare(sessions: int, rounds: int) -> None:
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    port = 18231
    url = f"http://127.0.0.1:{port}"
    log = Path(tempfile.mkstemp(suffix=".log")[1])
    with child([__file__, "--serve", str(port)], log) as service:
        wait_until_up(service, f"{url}/rl/v1/run", log)
        for _ in range(rounds):
            for name, figures in measured.items():
                command = [sys.executable, __file__, "--contend", name, url, str(sessions)]
                out = subprocess.run(command, capture_output=True, text=True, check=True)
                figures.append(tuple(json.loads(out.stdout)))
    cpu = {name: 1000 * median(cpu for cpu, _ in each) for name, each in measured.items()}
    for peer in ("httpx", "aiohttp"):
        ratio(f"AgentRunner / {peer}", cpu["AgentRunner"], cpu[peer])
    print(f"{machine()}; {AT_ONCE} at once, {sessions} sessions x {rounds} rounds\n")
    print(f"{'':14}{'CPU ms/session':>16}{'x aiohttp':>12}{'sessions/s':>12}")
    for name, figures in measured.items():
        rate = 1 / median(wall for _, wall in figures)
        print(f"{name:14}{cpu[name]:16.2f}{cpu[name] / cpu['aiohttp']:12.1f}{rate:12.0f}")


def starts(count: int) -> None:
    any_agent = Path(sys.executable).with_name("any-agent")
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import any_agent": [sys.executable, "-c", "import any_agent"],
        "from any_agent import AgentRunner": [
            sys.executable,
            "-c",
            "from any_agent import AgentRunner",
        ],
        "any-agent --help": [str(any_agent), "--help"],
    }
    print(f"\n{'':36}{'wall, s':>10}{'CPU, s':>10}   (median of {count})")
    for name, command in commands.items():
        walls, cpus = [], []
        for _ in range(count):
            before, began = os.times(), time.monotonic()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            walls.append(time.monotonic() - began)
            after = os.times()
            cpus.append(
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system
            )
        print(f"{name:36}{median(walls):10.3f}{median(cpus):10.3f}")


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--sessions", type=int, default=SESSIONS)
    flags.add_argument("--rounds", type=int, default=ROUNDS)
    flags.add_argument("--starts", type=int, default=STARTS)
    flags.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    flags.add_argument("--contend", nargs=3, help=argparse.SUPPRESS)
    arguments = flags.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.starts = 1, 3
    if arguments.smoke:
        arguments.sessions, arguments.rounds, arguments.starts = 64, 1, 1
    if arguments.serve:
        serve(arguments.serve)
    elif arguments.contend:
        name, url, sessions = arguments.contend
        contend(name, url, int(sessions))
    else:
        compare(arguments.sessions, arguments.rounds)
        starts(arguments.starts)
        finish(arguments)


if __name__ == "__main__":
    main()
