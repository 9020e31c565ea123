"""A slot that was granted is the one that the next open takes, whichever rank has it.

The router and two ranks are real. Agents grant slots and open sessions at once, in every way that
there is to, while a trainer has slots free on both ranks and half full groups wait for members of
the same tasks: none of them may get a member, and no slot of the trainer's may be taken.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest

from any_agent.chat import load_chat_format
from any_agent.keys import rank_of_session
from proxy_ext.journal.base import GRANT_OWNER
from tests.chaos.conftest import Figure
from tests.router.test_two_ranks import Pair, running_pair
from tests.support.proxy import LIMIT

AT_ONCE = 16
TASKS = [f"task-{k}" for k in range(8)]
START = "/rl/start_session"


@pytest.fixture
async def pair(tmp_path: Path, tiny_model_dir: Path) -> AsyncIterator[Pair]:
    chat = load_chat_format(str(tiny_model_dir), enable_thinking=False)
    settings = ("sessions.group_size=4", "rollout.max_concurrent=1000")
    async with running_pair(tmp_path, chat, *settings) as pair:
        yield pair


class Agent:
    """Opens sessions one after the other, each on a slot that it was granted."""

    def __init__(self, http: httpx.AsyncClient, number: int) -> None:
        self.opened: list[str] = []
        self.ways: Counter[str] = Counter()
        self._http = http
        self._random = random.Random(number)
        self._name = f"agent-{number}"
        self._key: str | None = None

    async def episode(self) -> None:
        await self._granted()
        task = self._random.choice([None, *TASKS])
        body = {} if task is None else {"task_id": task}
        way = self._random.choice(["body", "query", "once", "lane"])
        self.ways[way] += 1
        if way == "query":
            answers = [await self._http.post(START, params=body)]
        elif way == "once":
            headers = {"Idempotency-Key": f"{self._name}-{len(self.opened)}"}
            twice = (self._http.post(START, json=body, headers=headers) for _ in range(2))
            answers = await asyncio.gather(*twice)
        else:
            lane = {"api_key": self._key} if way == "lane" else {}
            answers = [await self._http.post(START, json=body | lane)]
        assert {a.status_code for a in answers} == {200}, [a.text for a in answers]
        (session,) = {a.json()["session_id"] for a in answers}
        self._key = answers[0].json()["api_key"]
        self.opened.append(session)

    async def _granted(self) -> None:
        """A grant's rank has nothing to do with that of the open."""
        body: dict[str, Any] = {}
        if self._random.random() < 0.3:
            body = {"task_id": self._random.choice(TASKS)}
        response = await self._http.post("/grant_capacity", json=body)
        assert response.status_code == 200, response.text


async def half_full_groups(http: httpx.AsyncClient) -> None:
    for task in TASKS:
        for _ in range(2):
            body = {"task_id": task}
            response = await http.post("/rl/v1/start_session", json=body)
            assert response.status_code == 200, response.text


def trainers(pair: Pair) -> list[Any]:
    """What is the trainer's at each rank: slots, groups and who is in them."""
    shown = []
    for proxy in pair.proxies.values():
        groups = {g.id: sorted(g.members) for g in proxy.service.sessions.groups.all()}
        capacity = proxy.service.leases.capacity()
        shown.append((capacity.admitted, capacity.reserved, capacity.running, groups))
    return shown


async def while_admitting(http: httpx.AsyncClient, work: Awaitable[Any]) -> int:
    """Do it while a trainer goes on setting its capacity; how often it did."""
    task = asyncio.ensure_future(work)
    times = 0
    while not task.done():
        body = {"limit": 1000, "ttl": 60, "owner": "trainer"}
        assert (await http.put("/rl/v1/capacity", json=body)).status_code == 200
        times += 1
        await asyncio.wait([task], timeout=0.05)
    await task
    return times


async def test_every_open_takes_the_slot_that_was_granted(
    pair: Pair, long: bool, figure: Figure
) -> None:
    episodes = (10_000 if long else 304) // AT_ONCE
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=pair.url, timeout=LIMIT, limits=limits) as http:
        await pair.admit(1000)
        await half_full_groups(http)
        before = trainers(pair)
        agents = [Agent(http, number) for number in range(AT_ONCE)]

        async def play(agent: Agent) -> None:
            for _ in range(episodes):
                await agent.episode()

        times = await while_admitting(http, asyncio.gather(*map(play, agents)))
        opened = [id for agent in agents for id in agent.opened]
        assert len(set(opened)) == len(opened) == episodes * AT_ONCE
        rows = [await _row(pair, id) for id in opened]
        assert {(row.owner, row.group_id) for row in rows} == {(GRANT_OWNER, None)}
        assert trainers(pair) == before
        assert (await http.get("/rl/v1/capacity")).json()["grants"] == 0
        created = sum(
            [sum((await p.service.journal.counts()).values()) for p in pair.proxies.values()]
        )
        assert created == len(opened) + 2 * len(TASKS), "no open opened twice"
        # Without a grant they are the trainer's again, in its groups.
        late = (await http.post(START, json={"task_id": TASKS[0]})).json()["session_id"]
        assert (await _row(pair, late)).group_id is not None
    ranks = Counter(rank_of_session(id) for id in opened)
    ways = sum((agent.ways for agent in agents), Counter())
    figure(
        f"{len(opened)} grants and as many opens ({dict(ways)}), {AT_ONCE} at once, while "
        f"the capacity was set {times} times: all on granted slots, by rank {dict(ranks)}; none of "
        f"the trainer's slots or of {len(TASKS)} half full groups touched"
    )


async def _row(pair: Pair, session_id: str) -> Any:
    rank = rank_of_session(session_id)
    assert rank is not None
    return (await pair.proxies[rank].service.sessions.by_id(session_id)).row
