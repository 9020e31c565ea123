"""Scripted agents and the service that they use, for `loop.py` and `staleness.py`.

Agents are coroutines of this process over raw aiohttp, so that they take little of the machine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from common import child

from any_agent.demo.driver import GROUP_SIZE
from any_agent.demo.task import Item, messages
from any_agent.errors import TooManyRequests, from_response
from any_agent.launcher import Node

Talk = list[dict[str, Any]]
Job = tuple[Item, str]
"""The questions, and the group of each; "" for an eval session."""
_MOST_REFUSALS = 20
_LOOK_EVERY = 0.1


class Service:
    """An agent's client of the service; every call raises the AnyAgentError of its answer."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def open(self, item: Item, group: str) -> tuple[str, Talk]:
        """Open a session, waiting for a slot; return its key and its conversation so far."""
        opening: dict[str, Any] = {"mode": "eval", "task_id": item.task_id}
        if group:
            opening |= {"mode": "train", "group_id": group, "group_size": GROUP_SIZE, "wait": 60}
        for attempt in itertools.count():
            try:
                started = await self._post("/rl/v1/start_session", opening)
                return str(started["api_key"]), [*messages(item)]
            except TooManyRequests:
                if attempt >= _MOST_REFUSALS:
                    raise
                await asyncio.sleep(0.2)
        raise AssertionError

    async def ask(self, key: str, talk: Talk) -> str:
        """Get the next answer and append it to the conversation."""
        body = {"model": "policy", "messages": talk}
        answer = await self._post("/v1/chat/completions", body, key)
        text = answer["choices"][0]["message"]["content"] or ""
        talk.append({"role": "assistant", "content": text})
        return str(text)

    async def end(self, key: str, reward: float) -> None:
        """Reward the last answer, and finalize."""
        await self._post("/rl/v1/set_reward", {"reward": reward}, key)
        await self._post("/rl/v1/finalize", {}, key)

    async def _post(self, path: str, body: dict[str, Any], key: str = "") -> Any:
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        async with self._http.post(
            self._url + path, data=orjson.dumps(body), headers=headers
        ) as response:
            answer = await response.read()
            if response.status != 200:
                raise from_response(response.status, answer, response.headers.get("retry-after"))
            return orjson.loads(answer)


@asynccontextmanager
async def service(node: Node) -> AsyncIterator[Service]:
    """Open a client of the node's service, without a limit of connections."""
    timeout = aiohttp.ClientTimeout(total=180)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        yield Service(http, node.url)


@asynccontextmanager
async def load(
    work: Callable[[], Coroutine[Any, Any, None]], agents: int
) -> AsyncIterator[asyncio.Task[None]]:
    """Run ``agents`` agents at ``work`` at once, as one task; stop them with the context."""

    async def crowd() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(agents):
                tasks.create_task(work())

    running = asyncio.create_task(crowd())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def look_after(
    node: Node,
    running: asyncio.Task[None],
    seconds: float,
    *,
    until: Callable[[], bool] | None = None,
) -> None:
    """Let the load run for ``seconds``, or ``until`` a condition holds, within ``seconds``.

    Raises the error of an agent or of the service.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while (remaining := deadline - loop.time()) > 0:
        # Here and not in a thread: children end with the thread that started them.
        node.check()
        if died := [part.name for part in node.parts.values() if part.restarts]:
            raise RuntimeError(f"{died[0]} died:\n{_end_of_log(node, died[0])}")
        if until is not None and until():
            return
        if running.done():
            running.result()
        await asyncio.sleep(min(_LOOK_EVERY, remaining))
    if until is not None:
        raise TimeoutError(f"not there after {seconds:g} s:\n{_end_of_log(node, 'trainer')}")


def _end_of_log(node: Node, part: str) -> str:
    return (node.dir.logs / f"{part}.log").read_text(errors="replace")[-2000:]


def groups(items: list[Item]) -> Iterator[Job]:
    """Yield each item once for every member of a group, endlessly, in new groups."""
    for number, item in enumerate(itertools.cycle(items)):
        for _ in range(GROUP_SIZE):
            yield item, f"{item.task_id}-{number}"


def make_model(folder: Path, seed: int) -> None:
    """Make the demo's warmed-up model in a process of its own."""
    log = folder.with_suffix(".log")
    command = ["-m", "any_agent.demo.model", str(folder), "--seed", str(seed)]
    # More threads than free cores cost such a small model ten times the time.
    with child(command, log, {"OMP_NUM_THREADS": "1"}) as process:
        if process.wait(300):
            raise RuntimeError(log.read_text())
