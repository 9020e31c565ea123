"""What tests of `AgentRunner` share: agents that make calls, and a look at what was trained on."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from any_agent.types import Trajectory
    from tests.support.proxy import Proxy

ITEMS = [{"question": f"Say {number}."} for number in range(4)]


class Asker:
    """An agent's own code: it knows the service's URL, and nothing of sessions."""

    def __init__(self, http: httpx.AsyncClient, reward: float | None) -> None:
        self._http = http
        self._reward = reward
        self.asked: Counter[str] = Counter()

    async def ask(self, item: dict[str, Any]) -> str:
        """A completion's id."""
        self.asked[item["question"]] += 1
        body = {
            "model": "gpt-4o",
            "messages": [{"role": "user", "content": item["question"]}],
            "max_tokens": 4,
        }
        response = await self._http.post("/chat/completions", json=body)
        response.raise_for_status()
        return str(response.json()["id"])

    async def run(self, item: dict[str, Any]) -> float | None:
        """One call, and the reward."""
        await self.ask(item)
        return self._reward


@asynccontextmanager
async def asker(reward: float | None = None) -> AsyncIterator[Asker]:
    """Against the service that the environment names."""
    async with httpx.AsyncClient(base_url=os.environ["OPENAI_BASE_URL"], timeout=30) as http:
        yield Asker(http, reward)


async def leased(proxy: Proxy) -> list[Trajectory]:
    """Everything that training would get now."""
    found: list[Trajectory] = []
    while more := await proxy.lease():
        found += more
    return found


def places(trajectories: list[Trajectory]) -> dict[str, list[tuple[int, int, int]]]:
    """By group: the epoch, the item and the member of each trajectory in it."""
    groups: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for one in trajectories:
        said = one.metadata
        # Behind the tenant's name.
        group = one.group_id.rpartition("/")[2]
        groups[group].append((said["epoch"], said["item"], said["member"]))
    return {group: sorted(members) for group, members in groups.items()}
