"""`RankClients`: one client for each rank of a run, at the address in its registry entry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from any_agent.client.rl_client import RLClient
from any_agent.errors import NotFound, ServiceUnavailable
from any_agent.keys import rank_of_session
from any_agent.rundir.registry import Registry, RegistryEntry, rank_name

T = TypeVar("T")

_RETRY_DELAY = 0.1
_POLL_INTERVAL = 0.2  # seconds between two reads of the registry's folder, for any number of calls


class RankClients:
    """One client per rank; each attempt of a call reads its rank's URL anew.

    Each call waits up to ``retry_for`` seconds for a rank that is away. Use it on one event
    loop, and ``close`` it.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        admin_key: str | Callable[[], str] | None = None,
        epoch: int | None = None,
        retry_for: float = 30.0,
    ) -> None:
        self._registry = Registry(folder)
        self._polled_at = -_POLL_INTERVAL
        self.clients: tuple[RLClient, ...] = tuple(
            RLClient(
                partial(self._url, rank),
                admin_key=admin_key,
                epoch=epoch,
                retry_for=retry_for,
                trust_env=False,
            )
            for rank in range(count)
        )

    def __len__(self) -> int:
        return len(self.clients)

    def entry(self, rank: int) -> RegistryEntry | None:
        """Return a rank's newest registry entry; None before its first one."""
        now = time.monotonic()
        if now - self._polled_at >= _POLL_INTERVAL:
            self._polled_at = now
            self._registry.refresh()
        return self._registry.get(rank_name(rank))

    def home(self, session_id: str) -> int:
        """Return the rank that a session lives on; NotFound if the run has no such rank."""
        rank = rank_of_session(session_id)
        if rank is None or rank >= len(self):
            raise NotFound(
                f"none of the {len(self)} ranks has the session {session_id[:80]!r}: continue a "
                "trial with as many ranks (server.ranks) as before"
            )
        return rank

    async def all(self, call: Callable[[int], Awaitable[T]]) -> list[T]:
        """Call every rank at once; all calls end before the first failure is raised."""
        calls = [asyncio.ensure_future(call(rank)) for rank in range(len(self))]
        await asyncio.gather(*calls, return_exceptions=True)
        return [ended.result() for ended in calls]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()

    def _url(self, rank: int) -> str | None:
        entry = self.entry(rank)
        return entry.url if entry is not None else None


def engine_urls(folder: Path, count: int, *, within: float = 60.0) -> list[str]:
    """Return the URL of each rank's engine from the registry; block until all are known.

    Raises ServiceUnavailable if a rank has not registered it ``within`` seconds.
    """
    registry = Registry(folder)
    deadline = time.monotonic() + within
    while True:
        registry.refresh()
        entries = [registry.get(rank_name(rank)) for rank in range(count)]
        urls = [entry.engine_url for entry in entries if entry is not None and entry.engine_url]
        if len(urls) == count:
            return urls
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"{count - len(urls)} of {count} ranks have not registered their engine within "
                f"{within:g} s: check that they run; their entries are in {folder}"
            )
        time.sleep(_RETRY_DELAY)
